// What else could have stood in a token's place: a panel by the token, from which the text goes on another way.

import { isBytes } from "./text.js";

const SHOW_AFTER = 150; // ms that a pointer rests on a token
const HIDE_AFTER = 300;

/** One panel for the page. `branch(span's place, token)` is called with the column's own function. */
export class Alternatives {
  constructor(panel) {
    this.panel = panel;
    this.timer = null;
    this.token = null; // whose panel is open
    this.pinned = false;
    panel.addEventListener("pointerenter", () => clearTimeout(this.timer));
    panel.addEventListener("pointerleave", () => this.leave());
    panel.addEventListener("keydown", (event) => this.move(event));
    document.addEventListener("pointerdown", (event) => {
      if (!panel.contains(event.target) && !event.target.closest(".token")) this.hide();
    });
  }

  /** For the tokens in `box`; `spanAt` gives a place's {text, tokens}, `branch` goes on with another token there. */
  watch(box, spanAt, branch) {
    const open = (node, pinned) => this.show(node, spanAt(Number(node.dataset.at)), branch, pinned);
    box.addEventListener("pointerover", (event) => {
      const node = event.target.closest(".token");
      if (event.pointerType !== "mouse" || !node) return;
      clearTimeout(this.timer);
      if (!this.pinned) this.timer = setTimeout(() => open(node, false), SHOW_AFTER);
    });
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("click", (event) => {
      const node = event.target.closest(".token");
      if (node) open(node, true);
    });
    box.addEventListener("keydown", (event) => {
      const node = event.target.closest(".token");
      if (!node || !["Enter", " "].includes(event.key) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      open(node, true);
      this.panel.querySelector("button")?.focus();
    });
  }

  leave() {
    clearTimeout(this.timer);
    if (!this.pinned) this.timer = setTimeout(() => this.hide(), HIDE_AFTER);
  }

  show(node, span, branch, pinned) {
    clearTimeout(this.timer);
    const rows = rowsOf(span);
    if (rows.length === 0 || !node.isConnected) return this.hide();
    Object.assign(this, { token: node, pinned });
    this.panel.replaceChildren(...rows.map((row) => this.row(row, node, branch)));
    this.panel.setAttribute("aria-label", `Alternatives to ${JSON.stringify(span.text)}`);
    this.panel.hidden = false;
    this.place(node);
  }

  row({ token, probability, written }, node, branch) {
    const button = document.createElement("button");
    button.type = "button";
    const percent = probability < 0.0005 ? "<0.1%" : `${(100 * probability).toFixed(probability < 0.1 ? 1 : 0)}%`;
    const bar = Object.assign(document.createElement("span"), { className: "bar" });
    bar.style.width = `${100 * probability}%`;
    const name = Object.assign(document.createElement("span"), { className: "what", textContent: visible(token) });
    const share = Object.assign(document.createElement("span"), { className: "share", textContent: percent });
    button.append(bar, name, share);
    const whole = !isBytes(token) && isText(token);
    const why = written ? "as written" : whole ? "go on from here" : "not text by itself, cannot be chosen";
    button.setAttribute("aria-label", `${JSON.stringify(token)}, ${percent}, ${why}`);
    button.title = why;
    if (written) button.classList.add("written");
    button.setAttribute("aria-disabled", String(written || !whole));
    button.addEventListener("click", () => {
      if (button.getAttribute("aria-disabled") === "true") return;
      this.hide();
      branch(Number(node.dataset.at), token);
    });
    return button;
  }

  /** Below its token, or above where there is no room, and within the window. */
  place(node) {
    const at = node.getClientRects()[0] ?? node.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.panel;
    const below = at.bottom + 4 + height <= window.innerHeight;
    const left = Math.min(Math.max(8, at.left - 8), document.documentElement.clientWidth - width - 8);
    this.panel.style.left = `${left + window.scrollX}px`;
    this.panel.style.top = `${(below ? at.bottom + 4 : at.top - height - 4) + window.scrollY}px`;
  }

  move(event) {
    const rows = [...this.panel.querySelectorAll("button")];
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    rows[(rows.indexOf(document.activeElement) + by + rows.length) % rows.length].focus();
  }

  /** Whether there was one to be closed. The focus goes back to the token, if it was within. */
  hide() {
    clearTimeout(this.timer);
    const open = !this.panel.hidden;
    if (open && this.panel.contains(document.activeElement)) this.token.focus();
    this.panel.hidden = true;
    this.pinned = false;
    return open;
  }
}

/** The likeliest tokens, and the written one where it is none of them. */
function rowsOf({ tokens }) {
  if (tokens.length === 0) return [];
  const [{ token, bits, top }] = tokens;
  const rows = Object.entries(top).map(([name, logp]) => ({ token: name, probability: Math.exp(logp), written: name === token }));
  rows.sort((a, b) => b.probability - a.probability);
  if (rows.length && !rows.some((row) => row.written)) rows.push({ token, probability: 2 ** -bits, written: true });
  return rows;
}

/** What the server takes as text: no control bytes, the end token among them. */
const isText = (token) => token !== "" && !/[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]/.test(token);

const visible = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "↵") || "(end)";
