/* Small things to show, and words for numbers. What is shown is text, whoever wrote it. */

export function piece(name, { text = "", ...fields } = {}, ...inner) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...(text === "" ? [] : [text]), ...inner);
  return made;
}

export function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

export function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
}
