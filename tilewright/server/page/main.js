// Puts the page together: the model's name, the theme, the key, and the two rooms.

import { get, setKey } from "./api.js";
import { makeKnobs } from "./knobs.js";
import { watchEngine } from "./live.js";
import { setUp } from "./playground.js";

const $ = (id) => document.getElementById(id);

// Theme: what the system says, unless chosen here.
const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}
setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
$("theme").addEventListener("click", () => {
  const now = localStorage.getItem("theme");
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});

// On a narrow screen one room is shown at a time.
for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    $("rooms").dataset.shown = button.dataset.view;
    for (const other of document.querySelectorAll("[data-view]")) other.setAttribute("aria-pressed", String(other === button));
  });
}

// Parameters that open below the edge come into sight.
$("knobs").addEventListener("toggle", () => {
  if ($("knobs").open) $("knobs").scrollIntoView({ block: "nearest" });
});

// Key: asked for when the server first says 401.
let asked = false;
function wantKey() {
  $("key-button").hidden = false;
  if (asked) return;
  asked = true;
  $("key-dialog").showModal();
}
$("key-button").addEventListener("click", () => $("key-dialog").showModal());
$("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "ok") return;
  setKey($("key").value.trim());
  location.reload();
});

const STATES = { on: "", draining: "Shutting down: running requests finish, new ones are refused.", off: "The server does not answer." };
function setState(state, view) {
  const shown = view?.draining ? "draining" : state;
  $("dot").className = `dot ${shown === "on" ? "on" : "off"}`;
  $("state").textContent = STATES[shown];
}

async function start() {
  watchEngine(setState, wantKey);
  let model;
  try {
    model = (await get("/v1/models")).data[0];
  } catch (error) {
    $("model").textContent = "no model";
    if (error.status === 401) wantKey();
    return;
  }
  $("model").textContent = model.id;
  $("model-note").textContent = `${model.max_model_len.toLocaleString("en")} tokens`;
  document.title = `${model.id} · tilewright`;
  makeKnobs(model.max_model_len);
  setUp(model, wantKey);
  $("prompt").focus();
}
start();
