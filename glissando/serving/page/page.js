// The page: what is asked of the server, and what is shown of its answers.

import { Failure, chunks, hasKey, json, paced, request, setKey } from "./client.js";
import { Dials } from "./dials.js";
import { Pictures } from "./picture.js";
import { Text, drawLegend, explore } from "./text.js";

const PRESETS = {
  Careful: { temperature: "0.3", top_p: "", top_k: "" },
  Balanced: { temperature: "0.8", top_p: "", top_k: "" },
  Bold: { temperature: "1.1", top_p: "0.95", top_k: "" },
  Greedy: { temperature: "0", top_p: "", top_k: "" },
};
const OWN = "Your own";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens"];
const LENGTH = 200; // tokens of a text, at first
const LOOK_LENGTH = 4000; // characters that a look takes
const LOOK_PAUSE = 500; // ms, and as long again as a look took, so that looking slows no slow machine down
const TURN_PAUSE = 100;

const $ = (id) => document.getElementById(id);
const pictures = new Pictures($("pictures"));
const dials = new Dials($("dials"), $("dial-list"), $("use-dials"), dialsTurned);
let model = null; // what the server says of it
let running = null; // the text that is being written
let text = null; // the one that is shown
let waiting = null; // what is done once there is a key that the server takes
let looking = true; // whether there is anything to be seen of this model
let lookTook = 0;

// ---------------------------------------------------------------- the model

async function meet() {
  let met;
  try {
    const { models: [first], ...limits } = await json("v1/glissando");
    met = { ...first, ...limits };
  } catch (error) {
    if (!model) $("about").textContent = "The model is not known yet.";
    return tell(error);
  }
  // Asked again, for a key: what was set meanwhile stays.
  if (JSON.stringify(met) === JSON.stringify(model)) return;
  model = met;
  $("about").textContent = aboutOf(model);
  document.title = `${model.model} · glissando`;
  $("max_tokens").value = Math.min(LENGTH, model.max_tokens);
  $("max_tokens").max = model.max_tokens;
  dials.build(model.controls);
}

function aboutOf({ model: name, parameters, mixers, depth, controls, max_prompt, max_tokens, max_length }) {
  const parts = [name, `${count(parameters)} parameters`, `${mixers.join(" and ")} over time, ${depth} depth`];
  if (controls.length) parts.push(`dials: ${controls.join(", ")}`);
  if (max_length) parts.push(`up to ${count(max_length)} tokens with the prompt`);
  else parts.push(`prompts up to ${count(max_prompt)} tokens, texts up to ${count(max_tokens)}`);
  return parts.join(" · ");
}

const count = (number) => number.toLocaleString("en");

// ---------------------------------------------------------------- writing

async function write() {
  if (running) return;
  hush();
  if (!model) await meet();
  if (!model || running) return;
  try {
    await stream(wanted());
  } catch (error) {
    tell(error, write);
  } finally {
    settle();
  }
}

/** The request's body. Throws Failure for a field that is no number. */
function wanted() {
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, numberOf(name)]));
  const seed = numberOf("seed") ?? Math.floor(Math.random() * 2 ** 31);
  const control = dials.values;
  return { model: model.model, prompt: $("prompt").value, ...numbers, seed, control, stream: true, logprobs: 0 };
}

/** A field's number; undefined where it is left to the server. */
function numberOf(name) {
  const input = $(name);
  const label = document.querySelector(`label[for=${name}]`).textContent;
  if (name === "max_tokens" && input.value !== "" && Number(input.value) < 1) {
    throw new Failure(400, `${label} must be at least 1, or no text would be written`, { param: name });
  }
  if (!input.validity.badInput) return input.value === "" ? undefined : Number(input.value);
  throw new Failure(400, `${label} is not a number; correct it, or clear the field`, { param: name });
}

async function stream(body) {
  const before = $("ending").textContent;
  running = { leave: new AbortController(), seed: body.seed, before, text: null, id: null, turned: false };
  begin();
  let finish = null;
  try {
    const response = await request("v1/completions", body, running.leave.signal);
    clear(body.prompt);
    for await (const chunk of chunks(response.body)) {
      finish = take(chunk) ?? finish;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (running.text) end("broken off");
      else $("ending").textContent = running.before;
      throw error;
    }
    finish = "left";
  }
  end({ stop: "the model ended it", length: "at its limit of tokens", left: "stopped by you" }[finish]);
}

function begin() {
  $("write").setAttribute("aria-disabled", "true");
  $("stop").setAttribute("aria-disabled", "false");
  $("ending").textContent = "Writing.";
  $("output").setAttribute("aria-busy", "true");
  dials.hold(true);
}

/** Not before the server has taken the request: what stands there stays until there is something else. */
function clear(prompt) {
  $("given").textContent = prompt;
  $("text").hidden = $("key-to-colours").hidden = false;
  $("readout").textContent = "";
  text = new Text($("written"));
  running.text = text;
  $("output").scrollIntoView({ block: "nearest" });
}

function take({ id, choices: [choice] }) {
  text.push(choice.text, choice.logprobs);
  if (running.id === null) {
    running.id = id;
    if (running.turned) turn();
  }
  look();
  return choice.finish_reason;
}

function end(why) {
  const written = running.text;
  $("ending").textContent = written ? `${written.summary}; ${why}. Seed ${running.seed}.` : "Stopped before it began.";
}

function settle() {
  running = null;
  $("write").setAttribute("aria-disabled", "false");
  $("stop").setAttribute("aria-disabled", "true");
  $("output").setAttribute("aria-busy", "false");
  dials.hold(false);
  look();
}

// ---------------------------------------------------------------- dials and looks

function dialsTurned() {
  if (!running) return look();
  dials.hold(true);
  running.turned = true;
  if (running.id !== null) turn();
}

const turn = paced(async () => {
  const { id } = running ?? {};
  if (!id) return;
  try {
    await json(`v1/completions/${id}/control`, { control: dials.values });
  } catch (error) {
    // A text that came to its end meanwhile has no dials to turn.
    if (error.code !== "not_found") tell(error);
  }
}, () => TURN_PAUSE);

const look = paced(async () => {
  if (!looking || !text) return;
  const began = performance.now();
  try {
    const answer = await json("v1/glissando/look", { model: model.model, text: lookedAt(), control: dials.values });
    looking = answer.looks.length > 0;
    $("looks").hidden = !looking;
    $("looks-error").hidden = true;
    pictures.show(answer);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    $("looks-error").textContent = `This is not the latest. ${error.sentence}`;
    $("looks-error").hidden = false;
  }
  lookTook = performance.now() - began;
}, () => LOOK_PAUSE + lookTook);

/** The end of the text; what the server would not take as text, an untrained model's control bytes, is replaced. */
function lookedAt() {
  const whole = $("given").textContent + text.content;
  return whole.slice(-LOOK_LENGTH).replace(/^[\udc00-\udfff]/, "").replace(/[\0-\x08\x0b\x0c\x0e-\x1f\x7f]/g, "\ufffd");
}

// ---------------------------------------------------------------- errors

/** What went wrong, as a sentence; `again` is done once there is a key, where that is what was missing. */
function tell(error, again = null) {
  if (!(error instanceof Failure)) {
    show(`This page has a defect: ${error.message}. Reload it.`);
    throw error;
  }
  if (error.status === 401) return askForKey(again);
  const field = $(error.param);
  field?.setAttribute("aria-invalid", "true");
  const fold = field?.closest("details");
  if (fold) fold.open = true;
  show(error.sentence);
}

function show(message) {
  $("error").textContent = message;
  $("error").hidden = false;
  $("error").scrollIntoView({ block: "nearest" }); // on a phone it stands below the fold
}

function hush() {
  $("error").hidden = true;
  for (const field of document.querySelectorAll("[aria-invalid=true]")) field.setAttribute("aria-invalid", "false");
}

function askForKey(again) {
  const refused = hasKey() && !$("key-form").hidden;
  show(refused ? "The server does not take this key. Try another." : "This server asks for a key. Type it above.");
  waiting = again;
  $("key-form").hidden = false;
  $("key").focus();
}

async function useKey(event) {
  event.preventDefault();
  const again = waiting;
  setKey($("key").value.trim());
  hush();
  await meet();
  if (!$("error").hidden) return;
  $("key-form").hidden = true;
  $("prompt").focus();
  again?.();
}

// ---------------------------------------------------------------- controls

function usePreset() {
  for (const [name, value] of Object.entries(PRESETS[$("preset").value] ?? {})) $(name).value = value;
}

/** The preset whose values the fields have. */
function namePreset() {
  const has = ([, values]) => Object.entries(values).every(([name, value]) => $(name).value === value);
  $("preset").value = Object.entries(PRESETS).find(has)?.[0] ?? OWN;
}

function connect() {
  $("preset").append(...[...Object.keys(PRESETS), OWN].map((name) => new Option(name)));
  $("preset").value = "Balanced";
  usePreset();
  $("preset").addEventListener("change", usePreset);
  $("sampling").addEventListener("input", (event) => event.target !== $("preset") && namePreset());
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    write();
  });
  $("stop").addEventListener("click", () => running?.leave.abort());
  $("key-form").addEventListener("submit", useKey);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.leave.abort();
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    write();
  });
  // Where the settings stand above the text, those of rare use are folded away.
  if (matchMedia("(max-width: 760px)").matches) $("sampling").open = false;
  drawLegend($("legend"));
  explore($("text"), (told) => ($("readout").textContent = told));
}

connect();
meet();
