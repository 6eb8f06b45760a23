/* A stream of server-sent events, piece by piece as it arrives: {comment} or {data}, each a text. */

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return; // what was not ended by an empty line is no event
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line.startsWith(":")) {
        yield { comment: line.slice(1).trim() };
      } else if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      } else if (line === "" && data.length) {
        yield { data: data.join("\n") };
        data = [];
      }
    }
  }
}
