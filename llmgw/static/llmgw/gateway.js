/* /v1/ of this origin, spoken to with a key of this page's own. The key is nowhere but in this object's memory;
   another page of the same user takes its place, and then it is asked for anew. */

const KEY_LASTS_MS = 55 * 60 * 1000;

/* A "no": its sentence says what to do next. */
export class Refusal extends Error {
  constructor(sentence, { status = 0, code = "", retryAfterS = 0, loading = null } = {}) {
    super(sentence);
    Object.assign(this, { status, code, retryAfterS, loading });
  }
}

export function refusalOf(error, status = 0, retryAfterS = 0) {
  const sentence = typeof error?.message === "string" && error.message ? error.message : "It was refused without a word.";
  return new Refusal(sentence, { status, code: error.code, retryAfterS, loading: error.loading });
}

export class Gateway {
  #key = "";
  #renewedAt = 0;

  constructor({ origin, keyUrl, csrf }) {
    Object.assign(this, { origin, keyUrl, csrf });
  }

  async models() {
    const answer = await this.#send("/v1/models");
    return (await answer.json()).data;
  }

  /* The answer of a chat, whose body is a stream. */
  chat(asked, signal) {
    return this.#send("/v1/chat/completions", asked, signal);
  }

  async #send(path, body, signal) {
    const isNew = !this.#key || performance.now() - this.#renewedAt > KEY_LASTS_MS;
    if (isNew) await this.#renew();
    let answer = await this.#fetch(path, body, signal);
    if (answer.status === 401 && !isNew) {
      await this.#renew();
      answer = await this.#fetch(path, body, signal);
    }
    const type = answer.headers.get("Content-Type") ?? "";
    if (!/^(application\/json|text\/event-stream)/.test(type)) throw this.#nobody();
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => ({}));
    if (typeof told.error !== "object") throw this.#nobody();
    throw refusalOf(told.error, answer.status, Number(answer.headers.get("Retry-After")) || 0);
  }

  async #fetch(path, body, signal) {
    const headers = { Authorization: `Bearer ${this.#key}` };
    const asks = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    try {
      return await fetch(path, { ...asks, headers, signal, credentials: "omit", cache: "no-store", redirect: "error" });
    } catch (fault) {
      if (fault.name === "AbortError") throw fault;
      throw new Refusal(`${this.origin} does not answer: see whether llmgw runs there, then try again.`);
    }
  }

  async #renew() {
    let answer;
    try {
      answer = await fetch(this.keyUrl, { method: "POST", headers: { "X-CSRFToken": this.csrf }, redirect: "manual" });
    } catch {
      throw new Refusal(`${this.origin} does not answer: see whether llmgw runs there, then try again.`);
    }
    if (answer.type === "opaqueredirect" || answer.status === 403) {
      throw new Refusal("Your login has ended, or may no longer make keys: load this page again.");
    }
    if (!answer.ok) throw new Refusal("No key could be made for this page: try again; llmgw's log tells more.");
    this.#key = (await answer.json()).key;
    this.#renewedAt = performance.now();
  }

  #nobody() {
    return new Refusal(
      `What answers at ${this.origin}/v1/ is not llmgw's gateway. Run it there too, with \`manage.py web\`; or, where ` +
        "`manage.py gateway` runs apart, have the proxy in front of both send /v1/ to it.",
    );
  }
}
