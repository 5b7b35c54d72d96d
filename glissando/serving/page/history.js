// What was written before, for undo and redo.

/** States of the page, in order; `take` gives the one that is shown, `show` shows another. */
export class History {
  constructor(undo, redo, take, show) {
    Object.assign(this, { undoButton: undo, redoButton: redo, take, show, states: [], at: -1 });
    undo.addEventListener("click", () => this.go(-1));
    redo.addEventListener("click", () => this.go(1));
    this.tell();
  }

  /** A new text begins: the one that is shown is kept, those undone are gone. */
  begin() {
    if (this.at >= 0) this.states[this.at] = this.take();
    this.states.length = this.at + 1;
    this.states.push(null);
    this.at += 1;
    this.tell();
  }

  /** The request of a new text was refused: it is as if it had not begun. */
  refuse() {
    this.states.pop();
    this.at -= 1;
    this.tell();
  }

  go(by) {
    if (!this.canGo(by)) return;
    this.states[this.at] = this.take();
    this.at += by;
    this.show(this.states[this.at]);
    this.tell();
  }

  canGo(by) {
    return this.at + by >= 0 && this.at + by < this.states.length;
  }

  tell() {
    this.undoButton.setAttribute("aria-disabled", String(!this.canGo(-1)));
    this.redoButton.setAttribute("aria-disabled", String(!this.canGo(1)));
  }
}
