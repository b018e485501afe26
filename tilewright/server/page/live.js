// The engine, as /live tells it a few times a second.

import { ApiError, get } from "./api.js";
import { mine } from "./playground.js";
import { colourNamed, colourOf, Pool } from "./pool.js";
import { showDrafts, showLatencies, showSteps } from "./steps.js";

const $ = (id) => document.getElementById(id);
const BUSY_MS = 250, IDLE_MS = 1000, DOWN_MS = 2000;
const HISTORY = 80, WINDOW_S = 2;

const pool = new Pool($("pool"), $("tip"));
const history = [];
const samples = [];
let timer = 0;

export function watchEngine(onState, onKeyWanted) {
  async function tick() {
    let wait = DOWN_MS;
    try {
      const view = await get("/live");
      show(view);
      onState("on", view);
      wait = view.running.length || view.waiting.length ? BUSY_MS : IDLE_MS;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) onKeyWanted();
      onState("off", null);
    }
    timer = document.hidden ? 0 : setTimeout(tick, wait);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !timer) tick(); });
  tick();
  return () => { clearTimeout(timer); tick(); };
}

const short = (id) => id.replace(/^((chat)?cmpl-|resp_)/, "").slice(0, 8);
const count = (number) => number.toLocaleString("en");
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

function show(view) {
  showRate(view);
  const { stats, pages } = view;
  const again = stats.preemptions ? `, ${count(stats.preemptions)} preemptions` : "";
  $("total").textContent = `${count(stats.generated_tokens)} tokens since the start${again}`;
  $("hits").textContent = percent(stats.prefix_hit_tokens, stats.prefix_query_tokens);
  $("hits-note").textContent = `${count(stats.prefix_hit_tokens)} tokens`;
  $("pages").textContent = percent(stats.pages_used, stats.pages_total);
  $("pages-note").textContent = `${count(stats.pages_used)} of ${count(stats.pages_total)}`;
  $("pool-note").textContent = pages.per_cell > 1 ? `· ${count(pages.page_size)} tokens a page, ${pages.per_cell} pages a cell` : `· ${count(pages.page_size)} tokens a page`;
  $("pool-words").textContent = `${stats.pages_used} pages in use, ${stats.pages_cached} kept for reuse, ${stats.pages_total} in all`;
  pool.show(pages.runs, pages.per_cell, new Map(view.running.map((r) => [r.slot, `${short(r.id)}${r.index ? ` #${r.index + 1}` : ""}`])));
  showRequests(view);
  showSteps(view.steps ?? []);
  showLatencies(view.latencies);
  showDrafts(stats);
}

// Tokens a second over the last moments, from the engine's own counter and clock.
function showRate({ time_s, stats }) {
  if (samples.length && time_s <= samples.at(-1)[0]) return;
  samples.push([time_s, stats.generated_tokens]);
  while (samples.length > 2 && samples[1][0] < time_s - WINDOW_S) samples.shift();
  const [[from_s, before], [to_s, now]] = [samples[0], samples.at(-1)];
  const rate = to_s > from_s ? Math.max(0, now - before) / (to_s - from_s) : 0;
  $("rate").textContent = rate < 10 && rate > 0 ? rate.toFixed(1) : count(Math.round(rate));
  history.push(rate);
  if (history.length > HISTORY) history.shift();
  drawSpark();
}

function drawSpark() {
  const canvas = $("spark"), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight, top = Math.max(...history, 1);
  canvas.width = width * scale;
  canvas.height = height * scale;
  if (history.length < 2) return;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const colour = colourNamed("--accent");
  const step = width / (HISTORY - 1), x0 = width - (history.length - 1) * step;
  const y = (rate) => height - 3 - (rate / top) * (height - 10);
  context.beginPath();
  history.forEach((rate, i) => context.lineTo(x0 + i * step, y(rate)));
  context.strokeStyle = colour;
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(x0, height);
  context.globalAlpha = 0.12;
  context.fillStyle = colour;
  context.fill();
}

const rows = new Map();

function showRequests({ running, waiting, stats }) {
  $("none").hidden = running.length + waiting.length > 0;
  const more = stats.running + stats.waiting - running.length - waiting.length;
  const words = [`${count(stats.running)} running`, `${count(stats.waiting)} waiting`];
  $("requests-note").textContent = `· ${words.join(", ")}${more > 0 ? ` (${count(more)} not listed)` : ""}`;
  const listed = [...running, ...waiting].map((r) => [`${r.id}/${r.index}`, r]);
  const now = new Set(listed.map(([name]) => name));
  for (const [name, row] of rows) if (!now.has(name)) { row.remove(); rows.delete(name); }
  const body = $("requests");
  listed.forEach(([name, request], index) => {
    const row = rows.get(name) ?? makeRow(request);
    rows.set(name, row);
    fill(row, request);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
}

function makeRow(request) {
  const row = document.createElement("tr");
  row.innerHTML = `<td><i class="swatch"></i><code></code></td><td class="n"></td><td class="n optional"></td><td class="n optional"></td>
    <td class="wide"><div class="progress"><i><b></b></i><span></span></div></td>`;
  row.querySelector("code").textContent = short(request.id) + (request.index ? ` #${request.index + 1}` : "");
  return row;
}

function fill(row, request) {
  const [, prompt, cached, pages] = row.children;
  const colour = colourOf(request.slot);
  row.className = request.slot === null ? "waiting" : "";
  if (mine.has(request.id) && !row.querySelector("em")) {
    row.querySelector("code").after(Object.assign(document.createElement("em"), { textContent: "yours" }));
  }
  const swatch = row.querySelector(".swatch");
  swatch.style.background = colour;
  swatch.style.boxShadow = request.slot === null ? "inset 0 0 0 1.5px var(--kept)" : "none";
  prompt.textContent = count(request.prompt);
  cached.textContent = request.cached ? count(request.cached) : "–";
  pages.textContent = request.pages || "–";
  const bar = row.querySelector("b");
  bar.style.background = colour;
  bar.style.width = `${(100 * request.output) / request.max}%`;
  row.querySelector("span").textContent = request.slot === null ? "waiting" : `${count(request.output)} / ${count(request.max)}`;
}
