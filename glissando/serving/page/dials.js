// A slider and a number for each of the model's controls, with words for its ends.

import { Failure } from "./client.js";
import { poles, position } from "./poles.js";

/** `changed` is called when a dial is turned. `suffix` ends the ids of this column. */
export class Dials {
  constructor(section, box, suffix, changed) {
    Object.assign(this, { section, box, suffix, changed, dials: new Map() });
  }

  /** Dials of these names; no name hides them. */
  build(names) {
    if (JSON.stringify(names) === JSON.stringify([...this.dials.keys()])) return;
    this.section.hidden = names.length === 0;
    this.box.replaceChildren();
    this.dials = new Map(names.map((name, index) => [name, this.dial(name, `dial-${index}${this.suffix}`)]));
  }

  dial(name, id) {
    const [low, high] = poles(name);
    const label = Object.assign(document.createElement("label"), { htmlFor: id, textContent: name });
    const range = field({ type: "range", id, min: "-1", max: "1", step: "0.05", value: "0" });
    const exact = field({ type: "number", step: "any", value: "0", ariaLabel: `${name}, as a number` });
    const beyond = Object.assign(document.createElement("p"), { className: "beyond" });
    beyond.setAttribute("role", "status");
    const tell = () => {
      const value = Number(exact.value);
      range.setAttribute("aria-valuetext", position(name, value));
      beyond.textContent = Math.abs(value) > 1 ? `${name}=${value} is outside -1 to 1, where this model was trained.` : "";
    };
    range.addEventListener("input", () => {
      exact.value = range.value;
      tell();
      this.turned(exact);
    });
    exact.addEventListener("input", () => {
      if (exact.value !== "") range.value = exact.value;
      tell();
      this.turned(exact);
    });
    exact.show = (value) => {
      exact.value = range.value = String(value);
      tell();
    };
    tell();
    const row = document.createElement("div");
    row.className = "dial";
    row.append(label, word(low), range, word(high), exact, beyond);
    this.box.append(row);
    return exact;
  }

  turned(exact) {
    exact.setAttribute("aria-invalid", "false");
    // A number that is being typed is none yet.
    if (exact.value !== "") this.changed();
  }

  /** Show {name: value}; null: all at 0. Names that this model does not have are passed over. */
  show(control) {
    for (const [name, exact] of this.dials) exact.show(control?.[name] ?? 0);
  }

  /** {name: value}; undefined where all are at 0, as without dials. Throws Failure for what is no number. */
  get values() {
    return Object.values(this.all).some((value) => value !== 0) ? this.all : undefined;
  }

  /** {name: value}, also at 0: a text that was under its dials is turned back, not freed of them. */
  get all() {
    return Object.fromEntries([...this.dials].map(([name, exact]) => [name, this.valueOf(name, exact)]));
  }

  valueOf(name, exact) {
    if (exact.value !== "") return Number(exact.value);
    exact.setAttribute("aria-invalid", "true");
    throw new Failure(400, `the dial ${name} is not a number; give one, such as 0.7`, { param: "control" });
  }
}

const field = (values) => Object.assign(document.createElement("input"), values);

function word(text) {
  const node = Object.assign(document.createElement("span"), { className: "pole", textContent: text });
  node.setAttribute("aria-hidden", "true"); // the slider says it
  return node;
}
