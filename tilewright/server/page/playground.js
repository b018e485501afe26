// Prompt in, streamed answer out, stop button.

import { ApiError, stream } from "./api.js";
import { asCurl, asPython, boxesNote, readBoxes, systemTurns } from "./asked.js";
import { readKnobs } from "./knobs.js";
import { grow } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const form = $("form"), prompt = $("prompt"), turns = $("turns"), answer = $("answer"), meta = $("meta"), go = $("go"), hint = $("hint");

// Ids of the requests that this page has made.
export const mine = new Set();

let mode = "complete";
let chat = [];
let running = null;

const HINTS = {
  complete: ["Write the beginning of something and let the model go on.", "It was a dark and stormy night"],
  chat: ["Ask something.", "Write a message"],
};

export function setUp(model, onKeyWanted) {
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    if (radio.value === "chat" && !model.chat) {
      radio.disabled = true;
      radio.parentElement.title = "This model has no chat template";
    }
    radio.addEventListener("change", () => setMode(radio.value));
  }
  setMode(model.chat ? "chat" : "complete");
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else run(model.id, onKeyWanted);
  });
  $("clear").addEventListener("click", clear);
  $("again").addEventListener("click", () => again(model.id, onKeyWanted));
  for (const [id, write] of [["copy-curl", asCurl], ["copy-python", asPython]]) {
    $(id).addEventListener("click", () => copy(model.id, write));
  }
  for (const id of ["system", "tools", "schema", "probabilities"]) $(id).addEventListener("input", boxesNote);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === prompt && !running) form.requestSubmit();
  });
}

function setMode(value) {
  mode = value;
  for (const box of document.querySelectorAll(".chat-only")) box.hidden = mode !== "chat";
  clear();
}

function clear() {
  running?.abort();
  running = null;
  go.classList.remove("stop");
  chat = [];
  turns.replaceChildren();
  meta.textContent = "";
  hint.hidden = false;
  [hint.textContent, prompt.placeholder] = HINTS[mode];
  go.textContent = mode === "chat" ? "Send" : "Generate";
  $("again").hidden = true;
}

// The fields beside the text; null, and the reader is told, where they are wrong.
function fieldsOrNothing() {
  try {
    return { ...readKnobs(), ...readBoxes(mode === "chat") };
  } catch (error) {
    $(error.message.includes("JSON") || error.message.includes("tools") ? "boxes" : "knobs").open = true;
    meta.textContent = error.message;
    return null;
  }
}

async function copy(model, write) {
  const fields = fieldsOrNothing();
  if (!fields) return;
  const [path, { stream: _, stream_options: __, ...asked }] = body(model, prompt.value || prompt.placeholder, fields);
  await navigator.clipboard.writeText(write(path, asked));
  meta.textContent = "Copied.";
}

// Takes the turns from the one at `index` on away; what the user said there is to be said again.
function backTo(index) {
  running?.abort();
  running = null;
  go.classList.remove("stop");
  go.textContent = "Send";
  const text = chat[index]?.content ?? "";
  chat.length = Math.min(chat.length, index);
  const shown = [...turns.children];
  const at = shown.findIndex((element) => Number(element.dataset?.at) === index);
  shown.slice(at < 0 ? shown.length : at).forEach((element) => element.remove());
  $("again").hidden = true;
  return text;
}

function again(model, onKeyWanted) {
  if (mode === "chat") prompt.value = backTo(chat.length - 2);
  run(model, onKeyWanted);
}

function turn(kind, text = "") {
  const element = Object.assign(document.createElement("div"), { className: `turn ${kind}`, textContent: text });
  turns.append(element);
  return element;
}

// One element for each answer; `said` is what the model was given to go on from.
function openAnswers(count, said) {
  const parent = count > 1 ? turns.appendChild(Object.assign(document.createElement("div"), { className: "samples" })) : turns;
  return Array.from({ length: count }, () => {
    const element = Object.assign(document.createElement("div"), { className: "turn live-text" });
    if (said) element.append(Object.assign(document.createElement("span"), { className: "said", textContent: said }));
    const body = element.appendChild(document.createElement("span"));
    parent.append(element);
    return { element, body, said: "" };
  });
}

function body(model, text, fields) {
  const common = { model, stream: true, stream_options: { include_usage: true }, ...fields };
  if (mode === "complete") return ["/v1/completions", { ...common, prompt: text }];
  return ["/v1/chat/completions", { ...common, messages: [...systemTurns(), ...chat, { role: "user", content: text }] }];
}

async function run(model, onKeyWanted) {
  const text = prompt.value || (mode === "complete" ? prompt.placeholder : "");
  if (!text) return prompt.focus();
  const fields = fieldsOrNothing();
  if (!fields) return;
  hint.hidden = true;
  const talk = mode === "chat" ? chat : null; // the page may be cleared, or switched, while this runs
  if (!talk) turns.replaceChildren();
  const asked = talk && turn("user", text);
  if (asked) editable(asked, talk.length);
  const answers = openAnswers(fields.n ?? 1, talk ? "" : text);
  const control = (running = new AbortController());
  const current = () => running === control;
  go.textContent = "Stop";
  go.classList.add("stop");
  const clock = watch();
  try {
    for await (const chunk of stream(...body(model, text, fields), control.signal)) {
      if (!current()) break;
      mine.add(chunk.id);
      for (const choice of chunk.choices) {
        grow(answers[choice.index], choice);
        if (choice.finish_reason) answers[choice.index].element.classList.remove("live-text");
      }
      clock.saw(chunk);
      follow();
    }
    if (talk && current()) prompt.value = "";
  } catch (error) {
    if (!current()) return;
    if (error.name === "AbortError") clock.stopped();
    else if (error instanceof ApiError && error.status === 401) onKeyWanted();
    else {
      meta.textContent = "";
      turn("error", error instanceof TypeError ? "The server does not answer." : error.message);
    }
  } finally {
    for (const { element } of answers) element.classList.remove("live-text");
    // What was said counts, even if it was stopped; a turn without an answer does not.
    const said = answers[0].said;
    if (talk && said) talk.push({ role: "user", content: text }, { role: "assistant", content: said });
    else asked?.classList.add("unanswered");
    if (current()) {
      running = null;
      go.classList.remove("stop");
      go.textContent = talk ? "Send" : "Generate";
      $("again").hidden = !answers[0].element.textContent;
    }
  }
}

function editable(element, index) {
  element.dataset.at = index;
  const button = Object.assign(document.createElement("button"), { type: "button", className: "plain edit", textContent: "Edit" });
  button.addEventListener("click", () => {
    prompt.value = backTo(index) || prompt.value;
    prompt.focus();
  });
  element.after(button);
  button.dataset.at = index;
}

function follow() {
  const below = answer.scrollHeight - answer.scrollTop - answer.clientHeight;
  if (below < 120) answer.scrollTop = answer.scrollHeight;
}

// The line under the answer: how many tokens, how fast.
function watch() {
  const started = performance.now();
  let first = null, chunks = 0, reasons = new Set();
  const seconds = (from) => (performance.now() - from) / 1000;
  const say = (tokens, end) => {
    const since = first === null ? 0 : seconds(first);
    const rate = since > 0.05 ? ` · ${((tokens - 1) / since).toFixed(0)} tokens/s` : "";
    const wait = first === null ? "" : ` · first after ${(first - started).toFixed(0)} ms`;
    meta.textContent = `${tokens} tokens · ${seconds(started).toFixed(1)} s${rate}${wait}${end}`;
  };
  meta.textContent = "Waiting for the first token …";
  return {
    saw(chunk) {
      if (chunk.choices.length) {
        first ??= performance.now();
        chunks += chunk.choices.length;
        for (const choice of chunk.choices) if (choice.finish_reason) reasons.add(choice.finish_reason);
      }
      if (chunk.usage) say(chunk.usage.completion_tokens, ` · ended by ${[...reasons].join(" and ")}`);
      else say(chunks, "");
    },
    stopped() { say(chunks, " · stopped"); },
  };
}
