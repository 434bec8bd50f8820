// @ts-check
// A client of `stockade serve` for JavaScript and TypeScript: one run, whose output comes while it
// runs. It needs fetch, as Node 18 and later have it, and no package. The types are in comments, which
// `tsc --checkJs` reads. As a program:
//
//   STOCKADE_KEY_FILE=token node run.mjs http://127.0.0.1:8722 'print(6*7)'

import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

/**
 * What `stockade exec` prints; the page `request-result` has all fields.
 * @typedef {{ output: string, error: string, code: number, success: boolean, verdict: string, reason: string | null, started: boolean, run: string }} Result
 * @typedef {{ type: string, run?: string, text?: string, base64?: string, result?: Result, problem?: { reason: string, detail: string, started: boolean } }} Event
 * @typedef {{ policy?: string, onStdout?: (text: string) => void, onStderr?: (text: string) => void, signal?: AbortSignal }} Options
 */

/** Why there is no result. Where `started` is false, the request may be sent again. */
export class Problem extends Error {
  /** @param {string} reason @param {string} detail @param {boolean} started @param {number=} retryAfter seconds */
  constructor(reason, detail, started, retryAfter) {
    super(detail);
    this.reason = reason;
    this.started = started;
    this.retryAfter = retryAfter;
  }
}

/**
 * Runs a request, such as `{ code: "print(6*7)" }`. When `signal` aborts, the run is cancelled.
 * @param {string} url @param {string} key the token @param {{ code: string, [field: string]: unknown }} request @param {Options} options
 * @returns {Promise<Result>}
 */
export async function run(url, key, request, { policy, onStdout, onStderr, signal } = {}) {
  const path = policy === undefined ? "/v1/run" : `/v1/run?policy=${encodeURIComponent(policy)}`;
  const authorization = `Bearer ${key}`;
  const response = await fetch(url + path, {
    method: "POST",
    headers: { authorization, "content-type": "application/json", accept: "application/x-ndjson" },
    body: JSON.stringify(request),
    // The key is for this address alone.
    redirect: "error",
    signal,
  });
  if (!response.ok || response.body === null) {
    const problem = await response.json().catch(() => ({}));
    const seconds = Number(response.headers.get("retry-after")) || undefined;
    throw new Problem(problem.reason ?? "server_answer", problem.detail ?? `status ${response.status}`, problem.started !== false, seconds);
  }
  let number = "";
  try {
    for await (const event of lines(response.body)) {
      if (event.type === "accepted") number = event.run ?? "";
      if (event.type === "stdout") onStdout?.(text(event));
      if (event.type === "stderr") onStderr?.(text(event));
      if (event.type === "result" && event.result) return event.result;
      if (event.type === "problem" && event.problem) {
        throw new Problem(event.problem.reason, event.problem.detail, event.problem.started);
      }
    }
  } catch (error) {
    if (signal?.aborted && /^\w+$/.test(number)) {
      await fetch(`${url}/v1/runs/${number}`, { method: "DELETE", headers: { authorization }, redirect: "error" });
    }
    throw error;
  }
  throw new Problem("server_lost", "the stream was cut; the code may have run", true);
}

/**
 * The objects of a stream, one a line.
 * @param {ReadableStream<Uint8Array>} body @returns {AsyncGenerator<Event>}
 */
async function* lines(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const all = (rest + part.value).split("\n");
    rest = all.pop() ?? "";
    for (const line of all) yield JSON.parse(line);
  }
}

/** @param {Event} event */
function text(event) {
  return event.text ?? Buffer.from(event.base64 ?? "", "base64").toString();
}

if (process.argv[1] !== undefined && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [url, code] = process.argv.slice(2);
  const key = (await readFile(process.env.STOCKADE_KEY_FILE ?? "token", "utf8")).trim();
  const interrupted = new AbortController();
  process.once("SIGINT", () => interrupted.abort());
  const result = await run(url, key, { code }, {
    onStdout: (part) => process.stdout.write(part),
    onStderr: (part) => process.stderr.write(part),
    signal: interrupted.signal,
  });
  process.exitCode = result.code;
}
