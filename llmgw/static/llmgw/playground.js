/* The playground's page: what was said, what is asked next, and what its answer cost.

   Whatever comes from a model, an engine or a file is text, and is shown as text. */

import { Gateway, Refusal, refusalOf } from "./gateway.js";
import { count, megabytes, piece } from "./pieces.js";
import { asCurl, asPython } from "./snippets.js";
import { events } from "./stream.js";
import { Answer, say, sayNothing, toEnd } from "./talk.js";

const at = (id) => document.getElementById(id);
const form = at("ask");
const { origin, key: keyUrl, models: modelsUrl, imagesBytes } = form.dataset;
const gateway = new Gateway({ origin, keyUrl, csrf: form.elements.csrfmiddlewaretoken.value });

const LOOKS = { ready: "good", loading: "busy", on_demand: "", off: "bad", unavailable: "bad" };
const LOOK_AGAIN_MS = 3000;

const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city, now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];
const SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string" },
    year: { type: "integer" },
    tags: { type: "array", items: { type: "string" }, maxItems: 5 },
  },
  required: ["title", "year", "tags"],
  additionalProperties: false,
};

let models = [];
let talk = []; // messages that were answered, and their answers
let images = []; // {name, url, bytes}
let calls = []; // of the last answer, those whose results are not typed in yet
let results = [];
let running = null; // what stops the request that runs
let isAway = false; // and the page says so

// --- what is told -------------------------------------------------------------------------------------------

function tellFault(fault) {
  const lines = [piece("p", { text: fault.message })];
  if (fault.retryAfterS) lines.push(piece("p", { text: `It may be answered ${count(fault.retryAfterS, "second")} from now: send it again then.` }));
  if (["loading", "off", "unavailable", "model_not_found"].includes(fault.code)) {
    const link = piece("a", { href: `${modelsUrl}?q=${encodeURIComponent(at("model").value)}`, text: "Look at the model" });
    lines.push(piece("p", {}, link));
  }
  at("fault").replaceChildren(...lines);
  at("fault").hidden = false;
}

function clearFault() {
  at("fault").hidden = true;
  at("fault").replaceChildren();
}

function tellNow(sentence, part = null) {
  at("now").textContent = sentence;
  at("progress").hidden = part === null;
  if (part !== null) at("progress").value = part;
}

// --- the model ----------------------------------------------------------------------------------------------

function chosen() {
  return models.find((each) => each.id === at("model").value);
}

async function readModels() {
  const select = at("model");
  const asked = new URLSearchParams(location.search).get("model");
  const wanted = select.value || asked;
  try {
    models = (await gateway.models()).filter((each) => !each.alias_of);
  } catch (fault) {
    isAway = true;
    tellFault(fault);
    return;
  }
  if (isAway) clearFault();
  isAway = false;
  const options = models.map((each) => piece("option", { value: each.id, text: `${each.id} (${each.status.replace("_", " ")})` }));
  const there = [...select.options].map((each) => each.textContent);
  if (options.map((each) => each.textContent).join("\n") !== there.join("\n")) select.replaceChildren(...options);
  const found = models.find((each) => each.id === wanted || each.aliases.includes(wanted));
  if (found) select.value = found.id;
  tellStanding();
}

function tellStanding() {
  const model = chosen();
  const told = [];
  if (!model) {
    const link = piece("a", { href: modelsUrl, text: "the models" });
    told.push("There is no model to chat with. Add one under ", link, ".");
  } else {
    const abilities = Object.keys(model.capabilities).filter((each) => model.capabilities[each]);
    const facts = [
      model.reason,
      model.context_length ? `context of ${model.context_length} tokens` : "",
      model.simulated ? "simulated: its answers mean nothing" : "",
      abilities.length ? `can do ${abilities.join(", ")}` : "",
    ];
    told.push(piece("span", { className: `badge ${LOOKS[model.status] ?? ""}`, text: model.status.replace("_", " ") }));
    told.push(facts.filter(Boolean).map((each) => ` ${each}`).join(";"));
  }
  if (at("standing").textContent !== piece("p", {}, ...told).textContent) at("standing").replaceChildren(...told);
  const sees = Boolean(model?.capabilities.vision);
  at("image").disabled = !sees;
  at("image-help").textContent = sees
    ? `Up to ${megabytes(imagesBytes)} in all, sent within the request.`
    : "This model is not set up for images.";
  showSnippets();
}

async function watch() {
  if (!document.hidden && !running && chosen()?.status !== "ready") await readModels();
  setTimeout(watch, LOOK_AGAIN_MS);
}

// --- the request --------------------------------------------------------------------------------------------

function readJson(id, what) {
  const text = at(id).value.trim();
  const told = at(`${id}-fault`);
  told.textContent = "";
  at(id).removeAttribute("aria-invalid");
  if (!text) return null;
  try {
    const value = JSON.parse(text);
    if (what === "list" ? !Array.isArray(value) : typeof value !== "object" || value === null) throw new Error(`it is no ${what}`);
    return value;
  } catch (fault) {
    told.textContent = `This is no JSON ${what}: ${fault.message}. Correct it, or empty the field.`;
    at(id).setAttribute("aria-invalid", "true");
    return undefined;
  }
}

/* The messages that are sent next; `text` is what the user has typed. */
function nextMessages(text) {
  if (calls.length) return [...results, { role: "tool", tool_call_id: calls[0].id, content: text }];
  if (!images.length) return [{ role: "user", content: text }];
  const parts = images.map((each) => ({ type: "image_url", image_url: { url: each.url } }));
  return [{ role: "user", content: [...(text ? [{ type: "text", text }] : []), ...parts] }];
}

/* null where a field cannot be read; it says so itself. */
function request(next) {
  const tools = readJson("tools", "list");
  const schema = readJson("schema", "object");
  if (tools === undefined || schema === undefined) return null;
  const system = at("system").value.trim();
  const asked = { model: at("model").value, messages: [...(system ? [{ role: "system", content: system }] : []), ...talk, ...next] };
  if (at("temperature").value !== "") asked.temperature = Number(at("temperature").value);
  if (at("max-tokens").value !== "") asked.max_tokens = Number(at("max-tokens").value);
  if (tools) asked.tools = tools;
  if (schema) asked.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  return { ...asked, stream: true, stream_options: { include_usage: true } };
}

function showSnippets() {
  const asked = request(nextMessages(at("text").value.trim() || "Hello?"));
  if (!asked) return;
  at("curl").textContent = asCurl(origin, asked);
  at("python").textContent = asPython(origin, asked);
}

// --- the talk -----------------------------------------------------------------------------------------------

function sayAsked(messages) {
  const articles = [];
  for (const { role, content } of messages.slice(results.length)) {
    const article = say(role === "tool" ? "user" : role, role === "tool" ? `Result of ${calls[0].function.name}` : "You");
    const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
    for (const part of parts) {
      if (part.type === "text") article.append(piece("p", { className: "words", text: part.text }));
      else article.append(piece("img", { src: part.image_url.url, alt: "an image that was sent" }));
    }
    articles.push(article);
  }
  toEnd();
  return articles;
}

function tellLoading(comment) {
  const found = /^loading (\w+)(?: (\d+)%)?$/.exec(comment);
  if (!found) tellNow(comment === "waiting" ? "The model is at work." : `The gateway says: ${comment}.`);
  else tellNow(`The model is loading: ${found[1]}${found[2] ? `, ${found[2]} %` : ""}.`, found[2] ? Number(found[2]) : null);
}

async function read(response, answer) {
  let isWhole = false;
  for await (const event of events(response.body)) {
    if (event.comment !== undefined) {
      tellLoading(event.comment);
    } else if (event.data === "[DONE]") {
      isWhole = true;
    } else {
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw refusalOf(chunk.error);
      answer.take(chunk);
      tellNow("The model answers.");
    }
  }
  if (!isWhole) throw new Refusal("The answer ends here unfinished, because the connection was cut: ask again.");
}

async function send() {
  const text = at("text").value.trim();
  if (running || !chosen()) return;
  if (!text && !images.length) {
    at("text").focus();
    return;
  }
  const next = nextMessages(text);
  if (calls.length > 1) {
    sayAsked(next);
    results = next;
    calls = calls.slice(1);
    at("text").value = "";
    askForResult();
    return;
  }
  const asked = request(next);
  if (!asked) {
    document.querySelector("[aria-invalid]").closest("details").open = true;
    document.querySelector("[aria-invalid]").focus();
    return;
  }
  running = new AbortController();
  clearFault();
  at("send").disabled = true;
  at("stop").disabled = false;
  const shown = sayAsked(next);
  const kept = { text: at("text").value, images };
  at("text").value = "";
  images = [];
  showImages();
  tellNow("Asked; no answer yet.");
  const answer = new Answer(asked.model);
  const begunAt = performance.now();
  let note = "";
  try {
    const response = await gateway.chat(asked, running.signal);
    answer.tellWho(response.headers, asked.model);
    await read(response, answer);
    tellNow("");
  } catch (fault) {
    const isStopped = fault.name === "AbortError";
    note = isStopped ? "stopped by you" : "unfinished";
    tellNow(isStopped ? "Stopped." : "");
    if (!isStopped) tellFault(fault instanceof Refusal ? fault : new Refusal(`The answer cannot be read: ${fault.message}`));
  }
  if (answer.isEmpty && note) {
    for (const each of [...shown, answer.article]) each.remove();
    if (!at("text").value) at("text").value = kept.text; // to be sent once more
    images = kept.images;
    showImages();
  } else {
    answer.end(begunAt, note);
    talk = [...talk, ...next, answer.message];
    results = [];
    calls = note ? [] : answer.calls;
    if (note && answer.calls.length) talk.splice(-1, 1, { role: "assistant", content: answer.text || "..." });
  }
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  askForResult();
  await readModels();
}

function askForResult() {
  at("text-label").textContent = calls.length ? `What ${calls[0].function.name} answers (of ${count(calls.length, "call")} to go)` : "Your message";
  at("text").focus();
  showSnippets();
}

function beginAnew() {
  running?.abort();
  talk = [];
  results = [];
  calls = [];
  images = [];
  sayNothing();
  at("text").value = "";
  clearFault();
  tellNow("");
  showImages();
  askForResult();
}

// --- images -------------------------------------------------------------------------------------------------

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Refusal(`${file.name} cannot be read: choose another file.`));
    reader.readAsDataURL(file);
  });
}

async function takeImages(files) {
  clearFault();
  try {
    for (const file of files) {
      if (!file.type.startsWith("image/")) throw new Refusal(`${file.name} is no image: choose another file.`);
      const bytes = images.reduce((sum, each) => sum + each.bytes, file.size);
      if (bytes > Number(imagesBytes)) {
        throw new Refusal(`With ${file.name} the images are ${megabytes(bytes)}, and may be ${megabytes(imagesBytes)} in all: choose a smaller one.`);
      }
      images = [...images, { name: file.name, url: await asDataUrl(file), bytes: file.size }];
    }
  } catch (fault) {
    tellFault(fault);
  }
  showImages();
  showSnippets();
}

function showImages() {
  const items = images.map((each) => {
    const button = piece("button", { type: "button", className: "button", text: `Leave out ${each.name}` });
    button.addEventListener("click", () => {
      images = images.filter((other) => other !== each);
      showImages();
      showSnippets();
      at("image").focus();
    });
    return piece("li", {}, piece("img", { src: each.url, alt: each.name }), button);
  });
  at("images").replaceChildren(...items);
}

// --- what is done here --------------------------------------------------------------------------------------

async function copy(id) {
  const text = at(id).textContent;
  try {
    await navigator.clipboard.writeText(text);
    at("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(at(id));
    at("copied").textContent = "It is selected: copy it with the keyboard.";
  }
}

function fillIn(id, value) {
  at(id).value = JSON.stringify(value, null, 2);
  at(id).focus();
  showSnippets();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("input", showSnippets);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("anew").addEventListener("click", beginAnew);
at("model").addEventListener("change", tellStanding);
at("image").addEventListener("change", async ({ target }) => {
  await takeImages([...target.files]);
  target.value = "";
});
at("tools-sample").addEventListener("click", () => fillIn("tools", TOOLS));
at("schema-sample").addEventListener("click", () => fillIn("schema", SCHEMA));
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", () => copy(button.dataset.copies));
}
addEventListener("focus", () => {
  if (!running) readModels();
});

await readModels();
watch();
