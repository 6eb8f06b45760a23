/* A request as a command and as a program. Neither holds a key, and images are left out of both. */

export function asCurl(origin, asked) {
  const body = JSON.stringify(shortened(asked), null, 2).replaceAll("'", "'\\''");
  return [
    `curl --no-buffer ${origin}/v1/chat/completions \\`,
    '  -H "Authorization: Bearer $LLMGW_KEY" \\',
    "  -H 'Content-Type: application/json' \\",
    `  -d '${body}'`,
  ].join("\n");
}

export function asPython(origin, asked) {
  const fields = Object.entries(shortened(asked)).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=os.environ["LLMGW_KEY"])`,
    "stream = client.chat.completions.create(",
    ...fields,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

function shortened(value) {
  if (typeof value === "string") return value.replace(/^(data:image\/[\w.+-]+;base64,).*$/s, "$1...");
  if (Array.isArray(value)) return value.map(shortened);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, shortened(inner)]));
}

function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value); // of texts and numbers Python reads JSON's
  const deeper = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const entries = Array.isArray(value)
    ? value.map((inner) => literal(inner, deeper))
    : Object.entries(value).map(([name, inner]) => `${JSON.stringify(name)}: ${literal(inner, deeper)}`);
  if (!entries.length) return open + close;
  return `${open}\n${entries.map((each) => `${deeper}${each},\n`).join("")}${indent}${close}`;
}
