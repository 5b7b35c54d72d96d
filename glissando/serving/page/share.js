// Texts taken elsewhere: to the clipboard, or into a file.

/** Put `text` on the clipboard; false where the browser does not let the page. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByHand(text); // over plain HTTP from another machine there is no clipboard
  }
}

function copyByHand(text) {
  const before = document.activeElement;
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

/** Offer `content` as a file. */
export function save(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
