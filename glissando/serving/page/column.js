// A column of the page: a model under its dials, and the text that it writes.

import { Failure, chunks, json, paced, request } from "./client.js";
import { Dials } from "./dials.js";
import { clean } from "./looks.js";
import { Text, explore } from "./text.js";

const TURN_PAUSE = 100; // ms between two moves of the dials that are sent
const ENDS = { stop: "the model ended it", sentence: "at the last sentence within its limit of tokens", length: "at its limit of tokens", left: "stopped by you" };
const NEAR_END = 40; // pixels below the window within which the end of the text is followed
const LAST_PART = 1 / 8; // of a text's limit: in this part the end of a sentence is its end
const SENTENCE_END = /[.!?]["'\u2019\u201d)]*\s*$/;
const ABBREVIATION = /(^|[^\p{L}\p{N}])(\p{Lu}|Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|Mt|vs|etc|[ei]\.\s?[eg])\.\s*$/u; // their dot ends none

/**
 * `on` has what happens outside: activated(column), pointed(column, place or null), described(words), failed(error),
 * branched(column, kept), chosen(column) when it has a model.
 */
export class Column {
  constructor(template, parent, suffix, alternatives, on) {
    this.root = template.content.cloneNode(true).firstElementChild;
    this.on = on;
    for (const node of this.root.querySelectorAll("[id]")) node.id += suffix;
    for (const node of this.root.querySelectorAll("[for]")) node.htmlFor += suffix;
    for (const name of ["aria-labelledby", "aria-describedby"]) {
      for (const node of this.root.querySelectorAll(`[${name}]`)) node.setAttribute(name, node.getAttribute(name) + suffix);
    }
    this.root.setAttribute("aria-label", suffix ? "Second text" : "First text");
    parent.append(this.root);
    this.$ = (name) => this.root.querySelector(`#${name}${suffix}`);
    this.suffix = suffix;
    this.text = null; // the one that is shown
    this.asked = null; // what it was asked for by: {model, temperature, start, control, turns}
    this.said = null; // and what columns share: {prompt, seed, max_tokens, top_p, top_k, pace}
    this.running = null;
    this.dials = new Dials(this.$("dials"), this.$("dial-list"), suffix, () => this.dialsTurned());
    this.turn = paced(() => this.send(), () => TURN_PAUSE);
    this.$("model").addEventListener("change", () => this.choose(this.model));
    this.root.addEventListener("pointerdown", () => on.activated(this));
    this.root.addEventListener("focusin", () => on.activated(this));
    explore(this.$("text"), (token) => this.tokenTold(token));
    alternatives.watch(this.$("text"), (at) => this.text.spans[at], (at, token) => this.branch(at, token));
  }

  // -------------------------------------------------------------- the model

  /** Models to choose from, as the server tells of them. */
  build(models) {
    this.models = models;
    const before = this.model;
    this.$("model").replaceChildren(...models.map(({ model }) => new Option(model)));
    this.$("model-choice").hidden = models.length < 2;
    this.choose(models.some(({ model }) => model === before) ? before : models[0].model);
  }

  choose(name) {
    this.$("model").value = name;
    const { controls, trained_on: corpus } = this.about;
    this.dials.build(controls);
    const trained = corpus ? `Trained on ${corpus}. ` : "";
    this.$("empty").textContent = `${trained}Nothing is written yet.`;
    this.on.chosen(this);
  }

  get model() {
    return this.$("model").value;
  }

  get about() {
    return this.models.find(({ model }) => model === this.model);
  }

  /** {model, temperature, control}. Throws Failure for what is no number. */
  get settings() {
    const field = this.$("temperature");
    if (field.validity.badInput) {
      throw new Failure(400, "Temperature is not a number; correct it, or clear the field", { param: field.id });
    }
    return { model: this.model, temperature: field.value, control: this.dials.values ?? null };
  }

  requireModel(model) {
    if (!model || this.models.some((each) => each.model === model)) return;
    const names = this.models.map((each) => each.model).join(", ");
    throw new Failure(404, `this is for the model ${model}, and this server has ${names}`, { param: "model" });
  }

  set settings({ model, temperature, control }) {
    this.requireModel(model);
    if (model) this.choose(model);
    this.$("temperature").value = temperature;
    this.dials.show(control);
  }

  // -------------------------------------------------------------- writing

  /** The prompt and what was kept behind it without its tokens. */
  get given() {
    return this.$("given").textContent;
  }

  get whole() {
    return this.given + (this.text?.content ?? "");
  }

  /**
   * Write a text: `shared` has prompt, seed and sampling, `kept` the spans that it goes on from. `asked` may bring turns
   * of the dials. Ends when the text does; throws Failure, also for settings that are none.
   */
  async write({ prompt, pace, ...shared }, { start = "", kept = [], turns = [] } = {}, accepted = () => {}) {
    const { model, temperature, control } = this.settings;
    const asked = { model, temperature, start, control, turns: [...turns] };
    const numbers = Object.fromEntries(
      Object.entries({ ...shared, temperature, pace }).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]),
    );
    const body = { ...numbers, model, prompt: clean(prompt + start), stream: true, logprobs: 5 };
    if (control) body.control = control;
    if (turns.length) body.turns = turns;
    const before = this.$("ending").textContent;
    const leave = new AbortController();
    const running = {
      leave, seed: shared.seed, id: null, text: null, turned: false, byHand: false, written: 0, marked: control,
    };
    this.running = running;
    this.begin();
    let finish = null;
    try {
      const response = await request("v1/completions", body, leave.signal);
      accepted();
      const shown = kept.map((span) => span.text).join("").length;
      this.clear((prompt + start).slice(0, (prompt + start).length - shown), kept);
      Object.assign(this, { asked, said: { prompt, pace, ...shared } });
      for await (const chunk of chunks(response.body)) {
        finish = this.take(chunk) ?? finish;
        if (finish || !this.endsNear(numbers.max_tokens)) continue;
        finish = "sentence";
        leave.abort();
        break;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        if (running.text) this.end("broken off");
        else this.$("ending").textContent = before;
        throw error;
      }
      finish ??= "left";
    } finally {
      this.running = null;
      this.$("text").setAttribute("aria-busy", "false");
      this.on.activated(this, true);
      if (finish) this.end(ENDS[finish], running);
    }
  }

  begin() {
    this.$("ending").textContent = "Writing.";
    this.$("text").setAttribute("aria-busy", "true");
  }

  /** Not before the server has taken the request: what stands there stays until there is something else. */
  clear(prompt, kept) {
    this.show(prompt, kept);
    this.text.begin();
    this.running.text = this.text;
    if (!this.suffix) this.$("ending").scrollIntoView({ block: "nearest" });
  }

  show(prompt, spans) {
    this.$("given").textContent = prompt;
    this.$("text").hidden = false;
    this.$("empty").hidden = true;
    this.text = new Text(this.$("written"), spans);
  }

  take({ id, choices: [choice] }) {
    const { running } = this;
    const { bottom } = this.$("ending").getBoundingClientRect();
    const follow = bottom > 0 && bottom < window.innerHeight + NEAR_END;
    const moved = choice.control && this.moved(choice.control);
    if (moved && !running.byHand) this.dials.show(choice.control); // the moves that a link holds
    this.text.push(choice.text, choice.logprobs, moved);
    running.written += choice.logprobs?.tokens.length ?? 0;
    if (follow) this.$("ending").scrollIntoView({ block: "nearest" });
    if (running.id === null) {
      running.id = id;
      if (running.turned) this.turn();
    }
    this.on.activated(this, true);
    return choice.finish_reason;
  }

  /** Whether the text is in the last part of its limit, and a sentence ends, its quotation marks closed. */
  endsNear(limit) {
    if (!(this.running.written >= limit * (1 - LAST_PART))) return false;
    if (ABBREVIATION.test(this.whole)) return false;
    return SENTENCE_END.test(this.whole) && this.whole.split('"').length % 2 === 1;
  }

  /** The dials that differ, and where they were moved, so that the text can be written again. */
  moved(control) {
    const { running, asked } = this;
    const before = running.marked ?? {};
    running.marked = control;
    const turn = { at: running.written, control };
    if (!asked.turns.some(({ at }) => at === turn.at)) asked.turns = [...asked.turns, turn].sort((a, b) => a.at - b.at);
    const changed = Object.entries(control).filter(([name, value]) => value !== (before[name] ?? 0));
    return Object.fromEntries(changed.length ? changed : Object.entries(control));
  }

  end(why, running = this.running) {
    const summary = running.text ? `${running.text.summary}; ${why}. Seed ${running.seed}.` : "Stopped before it began.";
    this.$("ending").textContent = summary;
  }

  stop() {
    this.running?.leave.abort();
  }

  // -------------------------------------------------------------- dials

  dialsTurned() {
    if (!this.running) return this.on.activated(this, true);
    this.running.byHand = true;
    this.change({ control: true });
  }

  setPace(pace) {
    if (this.running) this.change({ pace: pace === "" ? null : Number(pace) });
  }

  change(what) {
    this.running.turned = { ...this.running.turned, ...what };
    if (this.running.id !== null) this.turn();
  }

  async send() {
    const { id, turned } = this.running ?? {};
    if (!id || !turned) return;
    this.running.turned = false;
    try {
      const body = "pace" in turned ? { pace: turned.pace } : {};
      if (turned.control) body.control = this.dials.all;
      await json(`v1/completions/${id}/control`, body);
    } catch (error) {
      // A text that came to its end meanwhile has no dials to turn.
      if (error.code !== "not_found") this.on.failed(error);
    }
  }

  // -------------------------------------------------------------- tokens

  /** Go on from a part of the text with another token in its place. */
  branch(place, token) {
    const span = this.text.spans[place];
    const logp = span.tokens[0].top[token];
    const other = { text: token, tokens: [{ token, bits: -logp / Math.LN2, top: span.tokens[0].top }], chosen: true };
    this.on.branched(this, [...this.text.spans.slice(0, place), other]);
  }

  /** What to write behind the prompt to go on from `kept`. */
  from(kept) {
    const whole = this.given + kept.map((span) => span.text).join("");
    return { start: whole.slice(this.said.prompt.length), kept };
  }

  tokenTold(token) {
    const place = token ? Number(token.dataset.at) : null;
    this.on.pointed(this, place);
    if (token) this.on.described(`${JSON.stringify(token.textContent)}: ${token.dataset.description}`);
  }

  /** Show which part of the text a picture's column is; null: none. */
  point(place) {
    this.root.querySelector(".token.pointed")?.classList.remove("pointed");
    if (place !== null && place >= 0) this.$("written").querySelector(`[data-at="${place}"]`)?.classList.add("pointed");
  }

  clearAway() {
    this.text = this.asked = this.said = null;
    this.$("ending").textContent = "";
    this.$("text").hidden = true;
    this.$("empty").hidden = false;
  }

  // -------------------------------------------------------------- states

  /** What is shown, for undo. */
  get state() {
    const { given, asked, said } = this;
    const spans = this.text && [...this.text.spans];
    return { settings: asked ?? this.settings, given, spans, asked, said, ending: this.$("ending").textContent };
  }

  set state({ settings, given, spans, asked, said, ending }) {
    this.settings = settings;
    if (spans) this.show(given, spans);
    else this.clearAway();
    Object.assign(this, { asked, said });
    this.$("ending").textContent = ending;
  }
}
