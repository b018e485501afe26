// The engine's last steps: a bar each, as high as it took long, coloured by whose tokens it computed.

import { colourNamed } from "./pool.js";

const $ = (id) => document.getElementById(id);
const BARS = 120;

// steps: [number, milliseconds, tokens of prompts, rows that decode, drafts]
export function showSteps(steps) {
  const last = steps.slice(-BARS);
  const canvas = $("steps"), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  if (!last.length) {
    $("steps-words").textContent = "No step yet.";
    return;
  }
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const top = Math.max(...last.map((step) => step[1]));
  const wide = width / BARS;
  last.forEach(([, ms, prompts, decoding], i) => {
    const high = Math.max(2, (ms / top) * (height - 4));
    const x = width - (last.length - i) * wide;
    // A step that has both is drawn in two parts, by tokens.
    const share = prompts / Math.max(1, prompts + decoding);
    context.fillStyle = colourNamed("--accent");
    context.fillRect(x, height - high, Math.max(1, wide - 1), high * (1 - share));
    context.fillStyle = colourNamed("--quiet");
    context.fillRect(x, height - high * share, Math.max(1, wide - 1), high * share);
  });
  const [, ms, prompts, decoding, drafts] = last.at(-1);
  const guessed = drafts ? `, ${drafts} drafts` : "";
  $("steps-note").textContent = `· up to ${top.toFixed(1)} ms`;
  $("steps-words").textContent = `The last step took ${ms.toFixed(1)} ms: ${prompts} prompt tokens, ${decoding} decoding${guessed}.`;
}

const ms = (value) => (value === null || value === undefined ? "–" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

export function showLatencies(latencies) {
  for (const name of ["ttft", "itl"]) {
    const found = latencies?.[name] ?? {};
    $(name).textContent = found.p50 === undefined ? "–" : `${ms(found.p50)} ms`;
    $(`${name}-note`).textContent = found.p99 === undefined ? "" : `p90 ${ms(found.p90)}, p99 ${ms(found.p99)} ms`;
  }
}

export function showDrafts({ drafted_tokens: drafted, accepted_tokens: accepted, forced_tokens: forced }) {
  $("drafts").textContent = drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–";
  $("drafts-note").textContent = drafted ? `${accepted.toLocaleString("en")} of ${drafted.toLocaleString("en")}${forced ? `, ${forced.toLocaleString("en")} forced` : ""}` : "no drafts";
}
