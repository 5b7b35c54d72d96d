// The page: what is asked of the model, and what is shown of its text.

import { axes, poles, position } from "./poles.js";

const REASONS = {
  stop: "the model ended it",
  length: "at its length",
  left: "stopped by you",
};
const NUMBERS = {
  temperature: { whole: false, least: 0, most: Infinity },
  length: { whole: true, least: 1, most: Infinity },
  seed: { whole: true, least: 0, most: 2 ** 32 - 1 },
};

const $ = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const written = document.createTextNode("");
const dials = []; // the number field of each
let model = null;
let running = null; // the text that is being written
let texts = 0;
let frame = 0;

$("written").append(written);
$("about").textContent = "Loading the model.";
// On a phone the text is nearer so.
$("sampling").open = !matchMedia("(max-width: 760px)").matches;

worker.addEventListener("error", (event) => {
  tell(`The model cannot be loaded: ${event.message || "worker.js, or a file that it needs, is missing"}.`);
});
worker.addEventListener("message", ({ data }) => {
  if (data.progress) return loading(data.progress);
  if (data.ready) return meet(data.ready);
  if (data.failed) return failed(data.failed);
  if (data.id !== running?.id) return;
  if (data.begun) running.begun = data.begun;
  if (data.piece !== undefined) take(data);
  if (data.end) end(data.end);
});

// ---------------------------------------------------------------- the model

function loading({ loaded, size }) {
  const of = size ? ` of ${megabytes(size)}` : "";
  $("about").textContent = `Loading the model: ${megabytes(loaded)}${of} MB.`;
}

function meet(made) {
  model = made;
  document.title = `${made.name} · glissando`;
  const parts = [made.name, `${count(made.parameters)} parameters`, axes(made.mixers, made.depth)];
  if (made.capacity) parts.push(`up to ${count(made.capacity)} tokens with the prompt`);
  parts.push("computed in this browser, nothing is sent");
  $("about").textContent = parts.join(" · ");
  $("dials").hidden = made.dials.length === 0;
  made.dials.forEach(addDial);
  ready();
}

const count = (number) => number.toLocaleString("en");
const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

function addDial(name, index) {
  const id = `dial-${index}`;
  const label = Object.assign(document.createElement("label"), { htmlFor: id, textContent: name });
  const range = field({ type: "range", id, min: "-1", max: "1", step: "0.05", value: "0" });
  const exact = field({ type: "number", min: "-1", max: "1", step: "any", value: "0", ariaLabel: `${name}, as a number` });
  const tell = () => range.setAttribute("aria-valuetext", position(name, Number(range.value)));
  tell();
  range.addEventListener("input", () => {
    exact.value = range.value;
    tell();
    turned(exact);
  });
  exact.addEventListener("input", () => {
    if (exact.value !== "") range.value = exact.value;
    tell();
    turned(exact);
  });
  const row = document.createElement("div");
  row.className = "dial";
  const [low, high] = poles(name).map((text) => Object.assign(document.createElement("span"), { className: "pole", textContent: text }));
  row.append(label, exact, low, range, high);
  $("dial-list").append(row);
  dials.push(exact);
}

const field = (values) => Object.assign(document.createElement("input"), values);

function turned(exact) {
  exact.setAttribute("aria-invalid", "false");
  // A number that is being typed is none yet.
  if (running && dials.every(({ value }) => value !== "")) worker.postMessage({ control: dials.map(({ value }) => Number(value)) });
}

// ---------------------------------------------------------------- writing

function write() {
  if (!model || running) return;
  hush();
  let asked;
  try {
    asked = wanted();
  } catch (error) {
    return tell(error.message);
  }
  running = { id: asked.id, seed: asked.seed, begun: null, pending: "", tokens: 0, seconds: 0 };
  $("text").hidden = false;
  $("given").textContent = asked.prompt;
  written.data = "";
  $("ending").textContent = "";
  $("speed").textContent = "Reading the prompt.";
  enable($("write"), false);
  enable($("stop"), true);
  worker.postMessage({ write: asked });
}

/** What the fields hold. Throws Error for what is no number. */
function wanted() {
  const [temperature, length, seed] = Object.keys(NUMBERS).map(numberOf);
  const control = dials.map((input, index) => {
    if (input.value !== "") return Number(input.value);
    throw wrong(input, `The dial ${model.dials[index]} is not a number; give one, such as 0.7.`);
  });
  const prompt = $("prompt").value;
  return { id: ++texts, prompt, temperature, length, seed: seed ?? crypto.getRandomValues(new Uint32Array(1))[0], control };
}

/** A field's number; undefined of a seed that is left to chance. */
function numberOf(name) {
  const { whole, least, most } = NUMBERS[name];
  const input = $(name);
  const label = document.querySelector(`label[for=${name}]`).textContent;
  if (name === "seed" && input.value === "" && !input.validity.badInput) return undefined;
  const value = input.value === "" ? NaN : Number(input.value);
  if (value >= least && value <= most && (!whole || Number.isInteger(value))) return value;
  const kind = whole ? "a whole number" : "a number";
  const bounds = most === Infinity ? `of at least ${least}` : `from ${least} to ${most}`;
  throw wrong(input, `${label} must be ${kind} ${bounds}.`);
}

function wrong(input, message) {
  input.setAttribute("aria-invalid", "true");
  input.closest("details")?.setAttribute("open", "");
  input.focus({ preventScroll: true });
  return new Error(message);
}

/** A piece is shown with the next picture of the screen: several tokens may come before it. */
function take({ piece, tokens, seconds }) {
  running.pending += piece;
  if (tokens) Object.assign(running, { tokens, seconds });
  frame ||= requestAnimationFrame(show);
}

function show() {
  cancelAnimationFrame(frame);
  frame = 0;
  if (!running) return;
  written.appendData(running.pending);
  running.pending = "";
  $("speed").textContent = speed(running);
}

function speed({ tokens, seconds, begun }) {
  const parts = [`${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  // The first one is drawn from what the prompt has left.
  if (tokens > 1) parts.push(`${((tokens - 1) / seconds).toFixed(0)} tokens/s`);
  if (begun) parts.push(`prompt of ${count(begun.prompt)} read in ${(begun.seconds * 1000).toFixed(0)} ms`);
  return parts.join(", ");
}

function end(reason) {
  show();
  const full = `the model was exported for ${count(model.capacity ?? 0)} tokens, prompt included (--capacity)`;
  const why = reason === "full" ? full : REASONS[reason];
  if (!running.begun) $("speed").textContent = "";
  $("ending").textContent = `Ended: ${why}. Seed ${running.seed}.`;
  ready();
}

function failed(message) {
  tell(message);
  if (running) {
    show();
    if (!running.begun) $("speed").textContent = "";
  }
  if (model) ready();
  else $("about").textContent = "There is no model.";
}

function ready() {
  running = null;
  enable($("write"), true);
  enable($("stop"), false);
}

// ---------------------------------------------------------------- the form

const enable = (button, on) => button.setAttribute("aria-disabled", String(!on));

function tell(message) {
  $("error").textContent = message;
  $("error").hidden = false;
  $("error").scrollIntoView({ block: "nearest" });
}

function hush() {
  $("error").hidden = true;
  document.querySelectorAll("[aria-invalid=true]").forEach((input) => input.setAttribute("aria-invalid", "false"));
}

const stop = () => running && worker.postMessage({ stop: true });

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    write();
  }
});
