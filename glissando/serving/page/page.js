// The page: one prompt, one or two columns that write behind it, and what can be done with their texts.

import { Alternatives } from "./alternatives.js";
import { Failure, json } from "./client.js";
import { Column } from "./column.js";
import { connectKey, hush, tell } from "./failures.js";
import { History } from "./history.js";
import { Looks } from "./looks.js";
import { axes, poles } from "./poles.js";
import { fromFragment, toFragment } from "./recipe.js";
import { copy, save } from "./share.js";
import { drawLegend, fitColours } from "./text.js";

const PRESETS = {
  Careful: { temperature: "0.3", top_p: "", top_k: "" },
  Balanced: { temperature: "0.8", top_p: "", top_k: "" },
  Bold: { temperature: "1.1", top_p: "0.95", top_k: "" },
  Greedy: { temperature: "0", top_p: "", top_k: "" },
};
const OWN = "Your own";
const NUMBERS = ["top_p", "top_k", "max_tokens"];
const LENGTH = 400; // tokens of a text, at first: a story ends before
const SLOW = "15"; // tokens a second where there are dials to turn meanwhile

const $ = (id) => document.getElementById(id);
const alternatives = new Alternatives($("alternatives"));
const columns = [];
let serverInfo = null; // what the server says of its models
let written = null; // the fields as they were for the text that is shown
let linked = null; // of a link that was followed: what each column is written with, until the next text
let activeColumn = null; // the column whose inner pictures are shown

const sections = { section: $("looks"), title: $("looks-title"), error: $("looks-error"), box: $("pictures") };
const looks = new Looks(sections, () => activeColumn, headingOf);
const past = new History($("undo"), $("redo"), state, (before) => (state(before), link()));
const running = () => columns.some((column) => column.running);

// ---------------------------------------------------------------- models and columns

async function meet() {
  let met;
  try {
    met = await json("v1/glissando");
  } catch (error) {
    if (!serverInfo) $("about").textContent = "The model is not known yet.";
    return tell(error);
  }
  // Asked again, for a key: what was set meanwhile stays.
  if (JSON.stringify(met) === JSON.stringify(serverInfo)) return;
  const first = serverInfo === null;
  serverInfo = met;
  const dials = met.models.some((model) => model.controls.length);
  $("max_tokens").value = Math.min(LENGTH, met.max_tokens);
  $("max_tokens").max = met.max_tokens;
  if (first) setPace(dials ? SLOW : "");
  if (columns.length === 0) arrange(1);
  for (const column of columns) column.build(met.models);
  introduce();
  if (first) await follow();
  const [story] = columns[0].about.prompts ?? [];
  if (!first || !story || location.hash) return; // a link never starts to write by itself
  $("prompt").value = story;
  write();
}

function introduce() {
  const names = serverInfo.models.map((model) => model.model).join(", ");
  document.title = `${names} · glissando`;
  $("about").textContent = serverInfo.models.length > 1 ? names : aboutOf(columns[0].about);
}

/** What goes with the model of a column: its line beneath the text where there are several; for the first, examples. */
function accompany(column) {
  const line = column.$("model-about");
  line.hidden = serverInfo.models.length < 2;
  line.textContent = aboutOf(column.about);
  if (column !== columns[0]) return;
  offer();
  suggest(column.about.prompts ?? []);
}

function suggest(prompts) {
  $("examples").hidden = prompts.length === 0;
  for (const chip of $("examples").querySelectorAll("button")) chip.remove();
  for (const text of prompts) {
    $("examples").append(button(text, "chip", () => {
      $("prompt").value = text;
      linked = null;
      write();
    }));
  }
}

function headingOf(column) {
  if (columns.length < 2) return "Inside the model";
  return `Inside the model: ${column === columns[0] ? "first" : "second"} text, ${column.model}`;
}

function aboutOf({ model: name, parameters, mixers, depth, trained_on: corpus, max_length }) {
  const { max_prompt, max_tokens } = serverInfo;
  const parts = [name, `${count(parameters)} parameters`, axes(mixers, depth)];
  if (corpus) parts.push(`trained on ${corpus}`);
  if (max_length) parts.push(`up to ${count(max_length)} tokens with the prompt`);
  else parts.push(`prompts up to ${count(max_prompt)} tokens, texts up to ${count(max_tokens)}`);
  return parts.join(" · ");
}

const count = (number) => number.toLocaleString("en");

/** So many columns; new ones have the settings of the first. */
function arrange(number) {
  while (columns.length > number) columns.pop().root.remove();
  while (columns.length < number) {
    const column = new Column($("column"), $("columns"), columns.length ? "-b" : "", alternatives, {
      activated: (which, changed = false) => see(which, changed),
      pointed: (which, place) => looks.pointAtPicture(which, place),
      described: (words) => ($("readout").textContent = words),
      failed: tell,
      branched: (which, kept) => branch(which, kept),
      chosen: accompany,
    });
    columns.push(column);
    if (serverInfo) column.build(serverInfo.models);
    const settings = columns[0].settings;
    if (column !== columns[0]) column.settings = settings;
    column.$("temperature").addEventListener("input", namePreset);
  }
  $("columns").classList.toggle("two", number === 2);
  activeColumn = columns.includes(activeColumn) ? activeColumn : columns[0];
  if (serverInfo) offer();
  looks.ask(); // of which text they are stands above them
}

/** The pictures are those of the column that was touched last; `changed`: there is something new to see of this one. */
function see(column, changed) {
  if (changed && fitColours(columns.flatMap(({ text }) => text ?? []))) drawLegend($("legend"));
  if ((column === activeColumn) !== changed) return;
  activeColumn = column;
  looks.ask();
}

/** A button for each way to have two texts side by side; that of the first dial is the large one. */
function offer() {
  const { controls } = columns[0].about;
  const choices = controls.map((dial) => [wordsOf(dial), () => sideBySide((one, other) => {
    other.settings = one.settings;
    for (const [column, value] of [[one, -1], [other, 1]]) column.dials.show({ ...column.dials.values, [dial]: value });
  })]);
  choices.push(["Two temperatures", () => sideBySide((one, other) => {
    other.settings = { ...one.settings, temperature: "1.1" };
    one.$("temperature").value = "0.3";
    namePreset();
  })]);
  if (serverInfo.models.length > 1) choices.push(["Two models", () => sideBySide((one, other) => {
    other.choose(serverInfo.models.find(({ model }) => model !== one.model).model);
  })]);
  if (columns.length < 2) choices.push(["Settings of your own", () => arrange(2)]);
  else choices.push(["One text", oneText]);
  const made = ([name, work], kind) => button(name, kind, () => work()?.catch(tell));
  const large = controls.length > 0 ? choices.splice(0, 1) : [];
  $("ways").replaceChildren(...choices.map((each) => made(each, "chip")));
  $("beside").replaceChildren(...large.map(([name, work]) => made([`${name}, side by side`, work], "large")), $("ways"));
}

/** "Sad and happy", and the dial's own name where its ends have none. */
function wordsOf(dial) {
  const words = poles(dial).join(" and ");
  return /^\w/.test(words) ? words[0].toUpperCase() + words.slice(1) : `${dial} ${words}`;
}

async function sideBySide(set) {
  await halted(columns);
  arrange(2);
  set(...columns);
  linked = null;
  await write();
}

async function oneText() {
  await halted(columns);
  if (columns.some((column) => column.text)) past.begin();
  arrange(1);
}

async function halted(which) {
  for (const column of which) column.stop();
  while (which.some((column) => column.running)) await new Promise((resolve) => setTimeout(resolve, 10));
}

function button(textContent, className, work) {
  const made = Object.assign(document.createElement("button"), { type: "button", className, textContent });
  made.addEventListener("click", work);
  return made;
}

// ---------------------------------------------------------------- writing

/** `how` may have the seed, and for each column {start, kept, turns}; `which` are the columns that write. */
async function write(how = {}, which = columns) {
  const taken = () => which.some((column) => column.running);
  if (taken()) return;
  hush();
  if (!serverInfo) await meet();
  if (!serverInfo || taken()) return;
  alternatives.hide();
  let begun = false;
  try {
    const shared = { ...wanted(), ...how.shared };
    const fields = fieldsOf();
    for (const column of which) void column.settings; // before any of them begins
    const accepted = () => {
      if (!begun) past.begin();
      begun = true;
      linked = null;
      $("shared").textContent = "";
      written = fields;
      queueMicrotask(link);
      $("key-to-colours").hidden = false;
      $("readout").textContent = "";
    };
    const texts = which.map((column, index) => column.write(shared, how.columns?.[index], accepted));
    allow();
    const ends = await Promise.allSettled(texts);
    if (begun) link();
    const failed = ends.find(({ status }) => status === "rejected");
    if (failed) throw failed.reason;
  } catch (error) {
    tell(error, () => write(how, which));
  } finally {
    allow();
    looks.ask();
  }
}

/** The buttons for which there is something to do. */
function allow() {
  const writing = running();
  $("write").setAttribute("aria-disabled", String(writing));
  $("stop").setAttribute("aria-disabled", String(!writing));
  const text = columns.some((column) => column.text);
  for (const id of ["continue", "again", "copy-link", "copy", "save-text", "save-json"]) {
    $(id).setAttribute("aria-disabled", String(!text || (writing && ["continue", "again"].includes(id))));
  }
}

/** Prompt, seed and sampling, as they are spelled. Throws Failure for a field that is no number. */
function wanted() {
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, spelled(name)]));
  const seed = spelled("seed") || String(Math.floor(Math.random() * 2 ** 31));
  return { prompt: $("prompt").value, ...numbers, seed, pace: pace() };
}

function spelled(name) {
  const input = $(name);
  const label = document.querySelector(`label[for=${name}]`).textContent;
  if (name === "max_tokens" && input.value !== "" && Number(input.value) < 1) {
    throw new Failure(400, `${label} must be at least 1, or no text would be written`, { param: name });
  }
  if (!input.validity.badInput) return input.value;
  throw new Failure(400, `${label} is not a number; correct it, or clear the field`, { param: name });
}

const pace = () => document.querySelector("input[name=pace]:checked").value;

function setPace(value) {
  const radios = [...document.querySelectorAll("input[name=pace]")];
  (radios.find((radio) => radio.value === value) ?? radios.at(-1)).checked = true;
}

/** Every column that has a text goes on from its end. */
function goOn() {
  const which = columns.filter((column) => column.text);
  $("prompt").value = which[0].said.prompt;
  return write({ columns: which.map((column) => column.from(column.text.spans)) }, which);
}

/** The same prompt under another seed. */
function again() {
  const seed = spelled("seed");
  if (seed !== "") $("seed").value = String(Number(seed) + 1);
  return write();
}

async function branch(column, kept) {
  await halted([column]);
  const { prompt, seed } = column.said;
  $("prompt").value = prompt;
  await write({ shared: { seed }, columns: [column.from(kept)] }, [column]);
}

// ---------------------------------------------------------------- states and links

/** What the fields hold that all columns share, as it is spelled. */
function fieldsOf() {
  return { ...Object.fromEntries(["prompt", "seed", ...NUMBERS].map((id) => [id, $(id).value])), pace: pace() };
}

/** What is shown, for undo; with `before`, show that. */
function state(before) {
  if (!before) {
    const { pace: speed, ...values } = written ?? fieldsOf();
    return { values, pace: speed, columns: columns.map((column) => column.state) };
  }
  for (const column of columns) column.stop();
  for (const [id, value] of Object.entries(before.values)) $(id).value = value;
  setPace(before.pace);
  written = fieldsOf();
  arrange(before.columns.length);
  for (const [index, column] of columns.entries()) column.state = before.columns[index];
  namePreset();
  return looks.ask();
}

/** The address of what is shown: it holds prompt, seed, sampling and dials, and their moves. */
function link() {
  const asked = columns.filter((column) => column.asked);
  if (asked.length === 0) return;
  const { prompt, ...shared } = asked[0].said;
  const recipe = { prompt, ...shared, columns: asked.map((column) => column.asked) };
  history.replaceState(null, "", `#${toFragment(recipe)}`);
}

/** Show what a link holds. It is written at a click: whoever made the link must not make this server work. */
async function follow() {
  if (!serverInfo) return; // it is followed once the models are known
  try {
    const recipe = fromFragment(location.hash);
    if (!recipe && location.hash.length > 1) throw new Failure(400, "this link holds no text of the playground");
    if (!recipe) return;
    for (const { model } of recipe.columns) columns[0].requireModel(model); // before anything is changed
    hush();
    await halted(columns);
    $("prompt").value = recipe.prompt;
    for (const name of ["seed", ...NUMBERS]) $(name).value = recipe[name];
    setPace(recipe.pace);
    arrange(recipe.columns.length);
    for (const [index, column] of columns.entries()) column.settings = recipe.columns[index];
    namePreset();
    linked = recipe.columns.map(({ start, turns }) => ({ start, turns }));
    for (const place of [$("shared"), ...columns.map((column) => column.$("empty"))]) {
      place.textContent = "This link holds a text. Press Write to generate it.";
    }
    $("write").focus();
  } catch (error) {
    tell(error);
  }
}

const plain = () => columns.filter((column) => column.text).map((column) => column.whole);

function asText() {
  return plain().join("\n\n---\n\n");
}

function asJson() {
  const texts = columns.filter((column) => column.text).map((column) => ({ ...column.said, ...column.asked, text: column.whole, tokens: column.text.spans }));
  return JSON.stringify({ link: location.href, texts }, null, 2);
}

/** Do something with the texts and say so where a screen reader hears it. */
async function share(work, done) {
  $("shared").textContent = (await work()) === false ? "The browser does not let this page copy; select and copy it." : done;
}

// ---------------------------------------------------------------- controls

function usePreset() {
  const { temperature, ...values } = PRESETS[$("preset").value] ?? {};
  for (const [name, value] of Object.entries(values)) $(name).value = value;
  for (const column of columns) if (temperature !== undefined) column.$("temperature").value = temperature;
}

/** The preset whose values the fields have. */
function namePreset() {
  const value = (name) => (name === "temperature" ? columns[0].$(name).value : $(name).value);
  const has = ([, values]) => Object.entries(values).every(([name, wanted]) => value(name) === wanted);
  $("preset").value = Object.entries(PRESETS).find(has)?.[0] ?? OWN;
}

/** What buttons do while they are not disabled. */
function press(id, work) {
  $(id).addEventListener("click", () => {
    if ($(id).getAttribute("aria-disabled") === "true") return;
    Promise.resolve().then(work).catch(tell);
  });
}

function connect() {
  $("preset").append(...[...Object.keys(PRESETS), OWN].map((name) => new Option(name)));
  $("preset").value = "Balanced";
  $("preset").addEventListener("change", usePreset);
  $("sampling").addEventListener("input", (event) => event.target !== $("preset") && namePreset());
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    write(linked ? { columns: linked } : {});
  });
  $("prompt").addEventListener("input", () => (linked = null));
  $("pace").addEventListener("change", () => columns.forEach((column) => column.setPace(pace())));
  $("stop").addEventListener("click", () => columns.forEach((column) => column.stop()));
  press("continue", goOn);
  press("again", again);
  press("copy-link", () => share(() => (link(), copy(location.href)), "Link copied."));
  press("copy", () => share(() => copy(asText()), "Text copied."));
  press("save-text", () => share(() => save("glissando.txt", asText(), "text/plain"), "Text saved."));
  press("save-json", () => share(() => save("glissando.json", asJson(), "application/json"), "JSON saved."));
  connectKey(meet);
  addEventListener("hashchange", follow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !alternatives.hide()) columns.forEach((column) => column.stop());
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    write(linked ? { columns: linked } : {});
  });
  // Where the settings stand above the text, those of rare use are folded away.
  if (matchMedia("(max-width: 760px)").matches) $("sampling").open = false;
  drawLegend($("legend"));
}

connect();
meet();
