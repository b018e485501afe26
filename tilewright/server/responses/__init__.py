"""/v1/responses: OpenAI's Responses API without storage.

A body is converted to a chat (items.py, job.py), which is then handled like every chat. The answer is written as items and
their events (reply.py). Answers are not stored, so requests that refer to an earlier answer are refused.
"""

from tilewright.server.responses.body import ResponsesBody
from tilewright.server.responses.job import ResponsesJob, responses_job
from tilewright.server.responses.reply import ResponsesReply

__all__ = ["ResponsesBody", "ResponsesJob", "ResponsesReply", "responses_job"]
