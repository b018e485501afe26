// The pieces of an answer: text, thoughts, calls, and tokens with their probabilities.

// [{token, logprob, top}] of a chunk's choice, whichever endpoint it is of; [] where it has none.
function entries(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) return found.content.map((e) => ({ token: e.token, logprob: e.logprob, top: e.top_logprobs.map((t) => [t.token, t.logprob]) }));
  return (found.tokens ?? []).map((token, i) => ({ token, logprob: found.token_logprobs[i], top: Object.entries(found.top_logprobs[i] ?? {}) }));
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function tokenElement({ token, logprob, top }) {
  const element = Object.assign(document.createElement("span"), { className: "token", textContent: token });
  const chance = logprob === null ? 1 : Math.exp(logprob);
  element.style.setProperty("--doubt", `${Math.round(60 * (1 - chance))}%`);
  const others = top.filter(([text]) => text !== token).map(([text, value]) => `${JSON.stringify(text)} ${percent(value)}`);
  element.title = logprob === null ? token : [`${JSON.stringify(token)} ${percent(logprob)}`, ...others].join("\n");
  return element;
}

// Adds what a choice of a chunk says to an answer {element, text, said}.
export function grow(answer, choice) {
  const delta = choice.delta ?? {};
  const text = choice.text ?? delta.content ?? "";
  if (delta.reasoning_content) part(answer, "thought").append(delta.reasoning_content);
  for (const call of delta.tool_calls ?? []) {
    const element = part(answer, `call call-${call.index}`);
    if (call.function.name) element.append(`${call.function.name} `);
    element.append(call.function.arguments ?? "");
  }
  answer.said += text;
  const known = entries(choice);
  if (known.length) answer.body.append(...known.map(tokenElement));
  else if (text) answer.body.append(text);
}

function part(answer, name) {
  const found = answer.element.querySelector(`.${name.replaceAll(" ", ".")}`);
  if (found) return found;
  const made = Object.assign(document.createElement("div"), { className: name });
  answer.element.insertBefore(made, name === "thought" ? answer.body : null);
  return made;
}
