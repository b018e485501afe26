// Talking to the server: fetch with the key, errors as OpenAI writes them, server-sent events.

let key = sessionStorage.getItem("key") ?? "";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem("key", value);
}

async function request(path, options = {}) {
  const headers = { ...(options.body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `${path} answered ${response.status}`);
}

export async function get(path) {
  return (await request(path)).json();
}

// Yields the parsed `data:` of each event until [DONE]. An error inside the stream is thrown.
export async function* stream(path, body, signal) {
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "the connection ended before the answer did");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error.message);
      yield chunk;
    }
  }
}
