"""/v1/responses: OpenAI's Responses API without storage.

A body becomes a chat (items.py, job.py) and goes the way of every chat; what comes back is told as items and their events
(reply.py). Nothing is kept behind an answer, so what refers to an earlier one is refused.
"""

from tilewright.server.responses.body import ResponsesBody
from tilewright.server.responses.job import ResponsesJob, responses_job
from tilewright.server.responses.reply import ResponsesReply

__all__ = ["ResponsesBody", "ResponsesJob", "ResponsesReply", "responses_job"]
