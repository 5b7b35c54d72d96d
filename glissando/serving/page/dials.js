// A slider and a number for each of the model's controls.

import { Failure } from "./client.js";

/** `changed` is called when a dial is turned, or taken up. */
export class Dials {
  constructor(section, box, used, changed) {
    Object.assign(this, { section, box, used, changed, dials: new Map() });
    used.addEventListener("change", changed);
  }

  /** Dials of these names; no name hides them. */
  build(names) {
    this.section.hidden = names.length === 0;
    this.box.replaceChildren();
    this.dials = new Map(names.map((name, index) => [name, this.dial(name, `dial-${index}`)]));
  }

  dial(name, id) {
    const label = document.createElement("label");
    Object.assign(label, { htmlFor: id, textContent: name });
    const range = field({ type: "range", id, min: "-1", max: "1", step: "0.05", value: "0" });
    const exact = field({ type: "number", step: "any", value: "0", ariaLabel: `${name}, as a number` });
    range.addEventListener("input", () => {
      exact.value = range.value;
      this.turned(exact);
    });
    exact.addEventListener("input", () => {
      if (exact.value !== "") range.value = exact.value;
      this.turned(exact);
    });
    const row = document.createElement("div");
    row.className = "dial";
    row.append(label, range, exact);
    this.box.append(row);
    return exact;
  }

  turned(exact) {
    exact.setAttribute("aria-invalid", "false");
    this.used.checked = true;
    // A number that is being typed is none yet.
    if (exact.value !== "") this.changed();
  }

  /** While a text is written under its dials it cannot be freed of them: no value of a dial is its absence. */
  hold(held) {
    this.used.disabled = held && this.used.checked;
  }

  /** {name: value}, or undefined where they are not used. Throws Failure for what is no number. */
  get values() {
    if (!this.used.checked || this.dials.size === 0) return undefined;
    return Object.fromEntries([...this.dials].map(([name, exact]) => [name, this.valueOf(name, exact)]));
  }

  valueOf(name, exact) {
    if (exact.value !== "") return Number(exact.value);
    exact.setAttribute("aria-invalid", "true");
    throw new Failure(400, `the dial ${name} is not a number; give one, such as 0.7`, { param: "control" });
  }
}

const field = (values) => Object.assign(document.createElement("input"), values);
