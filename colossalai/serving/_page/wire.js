// What the page asks of the server and hears from it: requests with the key, events of a stream, errors in words.

const KEY = "colossalai.key";
const UNREACHABLE = "The server cannot be reached. It may have ended, or the network is down.";
const BROKEN = "The connection to the server broke before the end of the answer.";

// An error that can be shown as it is. Its status is that of HTTP, 0 where there was no answer.
export class Refusal extends Error {
  constructor(words, status = 0) {
    super(words);
    this.status = status;
  }
}

// The key lives as long as the tab. It is sent in a header, and never part of an address.
export const readKey = () => sessionStorage.getItem(KEY) || "";

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function ask(path, { body = null, signal = undefined } = {}) {
  const key = readKey();
  if (!/^[\x21-\x7e]*$/.test(key)) {
    throw new Refusal("A key has no spaces, accents or other special characters; look at it again.", 401);
  }
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== null) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      signal,
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal(UNREACHABLE);
  }
  if (!answer.ok) throw new Refusal(await words(answer, key), answer.status);
  return answer;
}

async function words(answer, key) {
  let said = "";
  try {
    said = (await answer.json()).error.message;
  } catch {
    said = `status ${answer.status}`; // somebody between the server and this page has answered
  }
  const seconds = Number(answer.headers.get("retry-after")) || 1;
  const later = `try again in ${seconds} second${seconds === 1 ? "" : "s"}`;
  switch (answer.status) {
    case 400: return `The server did not take this: ${said}.`;
    case 401: return key ? "This is not the key of the server." : "The server asks for an API key.";
    case 413: return "This is longer than the server reads.";
    case 429: return `The server is busy, its queue is full; ${later}.`;
    case 503: return `The server takes nothing new now (${said}); ${later}.`;
    default: return answer.status >= 500 ? `The server failed: ${said}.` : `The server refused: ${said}.`;
  }
}

// Yields the chunks of a stream of server-sent events. Returns only after the one that says that it is whole.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refusal(BROKEN);
    }
    if (part.done) throw new Refusal(BROKEN);
    const lines = (rest + part.value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(`The server failed in the middle of the answer: ${chunk.error.message}.`, 500);
      yield chunk;
    }
  }
}
