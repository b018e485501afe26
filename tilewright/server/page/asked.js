// What a request has beside its text: a system prompt, tools, a schema, and the whole of it as a command or a program.

const $ = (id) => document.getElementById(id);

function json(id, label) {
  const text = $(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}

// Fields of a request. Throws with a message for the reader where a box has no JSON.
export function readBoxes(chat) {
  const fields = {};
  const schema = json("schema", "The schema");
  if (schema !== null) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = chat ? json("tools", "The list of tools") : null;
  if (tools !== null) {
    if (!Array.isArray(tools)) throw new Error("The tools are no list, wanted [{\"type\": \"function\", \"function\": {...}}]");
    fields.tools = tools;
  }
  if ($("probabilities").checked) Object.assign(fields, chat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  return fields;
}

export function systemTurns() {
  const text = $("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

export function boxesNote() {
  const names = { system: "system prompt", tools: "tools", schema: "schema" };
  const used = Object.keys(names).filter((id) => $(id).value.trim()).map((id) => names[id]);
  if ($("probabilities").checked) used.push("probabilities");
  $("boxes-note").textContent = used.length ? `· ${used.join(", ")}` : "";
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl(path, body) {
  const url = `${location.origin}${path}`;
  return `curl -s ${quoted(url)} -H 'content-type: application/json' -d ${quoted(JSON.stringify(body, null, 2))}`;
}

// Python writes JSON's values but for three of them.
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const more = `${indent}    `;
  const inner = Array.isArray(value)
    ? value.map((item) => more + literal(item, more))
    : Object.entries(value).map(([key, item]) => `${more}${JSON.stringify(key)}: ${literal(item, more)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return inner.length ? `${open}\n${inner.join(",\n")},\n${indent}${close}` : open + close;
}

const OWN = new Set(["top_k", "min_p", "repetition_penalty"]);  // which OpenAI's client does not know

export function asPython(path, body) {
  const known = Object.entries(body).filter(([key]) => !OWN.has(key));
  const own = Object.fromEntries(Object.entries(body).filter(([key]) => OWN.has(key)));
  if (Object.keys(own).length) known.push(["extra_body", own]);
  const call = path.endsWith("chat/completions") ? "chat.completions" : "completions";
  const fields = known.map(([key, value]) => `    ${key}=${literal(value, "    ")},`).join("\n");
  return `from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key="none")\n` +
    `answer = client.${call}.create(\n${fields}\n)\nprint(answer)\n`;
}
