"use strict";
// Draws the charts in the colours of the page, again when those change; hands out the data. No text of the data becomes markup.
const root = document.documentElement;
const comparison = JSON.parse(document.getElementById("comparison").textContent);
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 760px)");
let chosen = null; // a theme, once somebody has pressed the button
let turn = 0;

const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

function painted(value) {
  if (typeof value === "string") return value.startsWith("$") && value !== "$schema" ? colour(value.slice(1)) : value;
  if (Array.isArray(value)) return value.map(painted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, key === "datasets" ? item : painted(item)]));
}

function config() {
  const [soft, ink, line, grid] = ["soft", "ink", "line", "grid"].map(colour);
  const fontSize = narrow.matches ? 10.5 : 12;
  return {
    background: "transparent",
    font: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: ink, titleColor: soft, gridColor: grid, domainColor: line, tickColor: line, labelFontSize: fontSize,
      titleFontSize: fontSize, titleFontWeight: "normal", labelLimit: narrow.matches ? 118 : 250, titlePadding: 8,
    },
    text: { fontSize },
  };
}

async function draw() {
  const mine = ++turn;
  root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  delete root.dataset.drawn;
  let drawn = 0;
  for (const [key, spec] of Object.entries(charts)) {
    if (mine !== turn) return;
    await vegaEmbed(document.getElementById("chart-" + key), painted(spec), {
      renderer: "svg", actions: false, ast: true, config: config(), defaultStyle: false, tooltip: { disableDefaultStyle: true },
    });
    drawn += 1;
  }
  root.dataset.drawn = String(drawn);
}

function csv(header, rows) {
  const cell = (value) => (/[",\r\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return [header, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

const files = {
  json: ["comparison.json", "application/json", () => JSON.stringify(comparison, null, 1)],
  runs: ["runs.csv", "text/csv", () => csv(["engine", "variant", "at_s", "seconds"],
    ["ours", "baseline"].flatMap((side) => comparison[side].runs.map((run) => [side, run.variant, run.at, run.seconds])))],
  segments: ["segments.csv", "text/csv", () => csv(
    ["segment", "layers", "verdict", ...["ratio", "ours_s", "baseline_s"].flatMap((name) => [name, name + "_low", name + "_high"]), "flops", "bytes"],
    comparison.segments.map((s) => [s.name, s.layers.join(" + "), s.verdict, ...s.ratio, ...s.ours, ...s.baseline, s.flops, s.bytes]))],
};

for (const button of document.querySelectorAll("button[data-file]")) {
  button.addEventListener("click", () => {
    const [name, type, make] = files[button.dataset.file];
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([make()], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
}
document.getElementById("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  draw();
});
dark.addEventListener("change", draw);
narrow.addEventListener("change", draw);
draw();
