// The sampling parameters: one table, from which the form is made and the request is filled.

const KNOBS = [
  { name: "max_tokens", label: "Most tokens", value: 200, min: 1, max: 2048, step: 1, sent: () => true },
  { name: "temperature", label: "Temperature", value: 0.8, min: 0, max: 2, step: 0.05, sent: () => true },
  { name: "top_p", label: "Top-p", value: 1, min: 0.01, max: 1, step: 0.01, sent: (v) => v < 1 },
  { name: "top_k", label: "Top-k", value: 0, min: 0, max: 200, step: 1, sent: (v) => v > 0 },
  { name: "min_p", label: "Min-p", value: 0, min: 0, max: 1, step: 0.01, sent: (v) => v > 0 },
  { name: "repetition_penalty", label: "Repetition penalty", value: 1, min: 0.5, max: 2, step: 0.01, sent: (v) => v !== 1 },
  { name: "n", label: "Answers at once", value: 1, min: 1, max: 8, step: 1, sent: (v) => v > 1 },
];

const inputs = new Map();

function knob({ name, label, value, min, max, step }) {
  const row = document.createElement("div");
  row.className = "knob";
  const words = Object.assign(document.createElement("label"), { textContent: label, htmlFor: `knob-${name}` });
  const number = Object.assign(document.createElement("input"), { type: "number", id: `knob-${name}`, min, max, step, value });
  const range = Object.assign(document.createElement("input"), { type: "range", min, max, step, value, ariaLabel: `${label}, slider` });
  range.addEventListener("input", () => { number.value = range.value; changed(); });
  number.addEventListener("input", () => { range.value = number.value; changed(); });
  row.append(words, number, range);
  inputs.set(name, number);
  return row;
}

function field(name, label, placeholder) {
  const row = document.createElement("div");
  row.className = "knob";
  const words = Object.assign(document.createElement("label"), { textContent: label, htmlFor: `knob-${name}` });
  const input = Object.assign(document.createElement("input"), { type: "text", id: `knob-${name}`, className: "long", placeholder });
  input.addEventListener("input", changed);
  row.append(words, input);
  inputs.set(name, input);
  return row;
}

function changed() {
  const note = KNOBS.filter((k) => Number(inputs.get(k.name).value) !== k.value).map((k) => `${k.label} ${inputs.get(k.name).value}`);
  document.getElementById("knobs-note").textContent = note.length ? `· ${note.join(", ")}` : "";
}

export function makeKnobs(maxModelLen) {
  const grid = document.getElementById("knob-grid");
  const most = Math.min(2048, maxModelLen - 1);
  grid.append(...KNOBS.map((k) => knob(k.name === "max_tokens" ? { ...k, max: most, value: Math.min(k.value, most) } : k)));
  grid.append(field("seed", "Seed", "random"), field("stop", "Stop before", "e.g. \\n\\n"));
}

// The fields of a request. Throws with a message for the reader where a number is none.
export function readKnobs() {
  const fields = {};
  for (const { name, label, min, max, sent } of KNOBS) {
    const input = inputs.get(name);
    if (input.value === "" || !input.checkValidity()) throw new Error(`${label} is ${input.value || "empty"}, wanted ${min} to ${input.max || max}`);
    const value = Number(input.value);
    if (sent(value)) fields[name] = value;
  }
  const seed = inputs.get("seed").value.trim();
  if (seed && !/^-?\d{1,15}$/.test(seed)) throw new Error(`Seed is ${seed}, wanted a whole number, or nothing for a random one`);
  if (seed) fields.seed = Number(seed);
  const stop = inputs.get("stop").value.replaceAll("\\n", "\n");
  if (stop) fields.stop = [stop];
  return fields;
}
