// The model's inner pictures over the end of a text, and which of their columns is which token of the text.

import { Failure, json, paced } from "./client.js";
import { Pictures } from "./picture.js";
import { byteLength } from "./text.js";

const LENGTH = 4000; // characters that a look takes
const PAUSE = 500; // ms, and as long again as a look took, so that looking slows no slow machine down

/** What the server would not take as text, an untrained model's control bytes, is replaced. */
export const clean = (text) => text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\x7f]/g, "\ufffd");

/** `current` gives the active column, `headingOf` what stands above a column's pictures. */
export class Looks {
  constructor({ section, title, error, box }, current, headingOf) {
    Object.assign(this, { section, title, error, current, headingOf, blind: new Set(), took: 0, shown: null });
    this.pictures = new Pictures(box, (token) => this.pointAtText(token));
    this.ask = paced(() => this.once(), () => PAUSE + this.took);
  }

  async once() {
    const column = this.current();
    if (!column?.text || this.blind.has(column.model)) return;
    const began = performance.now();
    const whole = clean(column.whole);
    const text = whole.slice(-LENGTH).replace(/^[\udc00-\udfff]/, "");
    try {
      const answer = await json("v1/glissando/look", { model: column.model, text, control: column.dials.values });
      if (answer.looks.length === 0) this.blind.add(column.model);
      this.section.hidden = answer.looks.length === 0;
      this.error.hidden = true;
      this.title.textContent = this.headingOf(column);
      this.shown = { column, starts: startsOf(answer.tokens, byteLength(whole)) };
      this.pictures.show(answer);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.error.textContent = `This is not the latest. ${error.sentence}`;
      this.error.hidden = false;
    }
    this.took = performance.now() - began;
  }

  /** Frame the pictures' column of a part of the text; null: none. */
  pointAtPicture(column, place) {
    if (this.shown?.column !== column) return;
    if (place === null) return this.pictures.point(null);
    const at = bytesBefore(column, place);
    const token = this.shown.starts.findLastIndex((start) => start <= at);
    this.pictures.point(token < 0 ? null : token); // the pictures show the end of a long text
  }

  pointAtText(token) {
    const { column, starts } = this.shown;
    if (token === null || starts[token] < 0) return column.point(null);
    let end = byteLength(clean(column.given));
    const place = column.text.spans.findIndex((span) => (end += byteLength(clean(span.text))) > starts[token]);
    column.point(starts[token] < byteLength(clean(column.given)) ? null : place);
  }
}

/** Where the tokens at the end of a text of so many bytes begin; before 0 stands the token for its beginning. */
function startsOf(tokens, bytes) {
  const starts = [];
  let at = bytes;
  for (const token of [...tokens].reverse()) starts.unshift((at -= byteLength(token)));
  return starts;
}

function bytesBefore(column, place) {
  const before = column.text.spans.slice(0, place).map((span) => span.text).join("");
  return byteLength(clean(column.given + before));
}
