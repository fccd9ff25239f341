// Loads a trace into Perfetto's trace processor and prints the rows of each SQL query as a line of JSON.
//
//     node tests/perfetto.js FOLDER TRACE QUERY...
//
// FOLDER has engine_bundle.js and trace_processor.wasm of Perfetto's user interface, which runs them in a web worker. This file
// stands in for the browser. The messages are those of protos/perfetto/trace_processor/trace_processor.proto.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [folder, trace, ...queries] = process.argv.slice(2);

const METHOD = { append: 1, finalize: 2, query: 3 };  // TraceProcessorRpc.TraceProcessorMethod
const VARINT = 0, FIXED64 = 1, BYTES = 2;  // wire types of protocol buffers

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value & 127) | 128);
  return Buffer.from([...bytes, value]);
}
const number = (field, value) => Buffer.concat([varint(field * 8 + VARINT), varint(value)]);
const message = (field, content) => Buffer.concat([varint(field * 8 + BYTES), varint(content.length), content]);

function* varints(data, at = 0) {  // yields [value, index of the next byte]
  while (at < data.length) {
    let value = 0n, shift = 0n, byte;
    do { byte = data[at++]; value |= BigInt(byte & 127) << shift; shift += 7n; } while (byte & 128);
    yield [value, at];
  }
}

function fields(data) {  // returns [field, value] of a message
  const found = [];
  for (let at = 0; at < data.length;) {
    const [key, start] = varints(data, at).next().value, wire = Number(key) & 7;
    let [value, end] = wire === FIXED64 ? [8n, start] : varints(data, start).next().value;
    at = end;
    if (wire !== VARINT) { value = data.subarray(end, end + Number(value)); at += value.length; }
    found.push([Number(key) >> 3, value]);
  }
  return found;
}
const all = (content, field) => content.filter(([number]) => number === field).map(([, value]) => value);
const integers = data => [...varints(data)].map(([value]) => Number(BigInt.asIntN(64, value)));
function raise(errors) { for (const error of errors) throw new Error(error.toString()); }

let columns = [], cells = [];
function addResult(result) {  // a QueryResult
  raise(all(result, 2));
  columns = [...columns, ...all(result, 1).map(String)];
  for (const batch of all(result, 3).map(fields)) {
    const whole = all(batch, 2).flatMap(integers), text = all(batch, 5).flatMap(part => part.toString().split("\0"));
    const real = all(batch, 3).flatMap(part => [...Array(part.length / 8).keys()].map(index => part.readDoubleLE(8 * index)));
    const next = { 1: () => null, 2: () => whole.shift(), 3: () => real.shift(), 4: () => text.shift() };
    cells.push(...all(batch, 1).flatMap(integers).map(kind => next[kind]()));
  }
}

const port = {
  postMessage(data) {
    for (const reply of all(fields(Buffer.from(data)), 1).map(fields)) {
      raise(all(reply, 5));  // a fatal error
      for (const appended of all(reply, 201).map(fields)) raise(all(appended, 2));
      for (const result of all(reply, 203).map(fields)) addResult(result);
    }
  },
};

class XMLHttpRequest {
  open(method, name) { this.name = name; }
  send() { this.response = new Uint8Array(fs.readFileSync(path.join(folder, this.name))).buffer; }
}

const quiet = { log() {}, warn() {}, error() {} };
const browser = { console: quiet, URL, TextDecoder, TextEncoder, performance, crypto, setTimeout, XMLHttpRequest };
const worker = vm.createContext({ ...browser, WorkerGlobalScope: Object, location: { href: "file:///worker" } });
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);
worker.onmessage({ data: port });

let sent = 0;
function send(method, content = Buffer.alloc(0)) {
  worker.request = message(1, Buffer.concat([number(1, sent++), number(2, method), content]));
  port.onmessage({ data: vm.runInContext("new Uint8Array(request)", worker) });  // an array of the worker's own realm
}

function run() {
  send(METHOD.append, message(101, fs.readFileSync(trace)));
  send(METHOD.finalize);
  for (const query of queries) {
    columns = []; cells = [];
    send(METHOD.query, message(103, message(1, Buffer.from(query))));
    const rows = Array.from({ length: cells.length / columns.length }, (_, row) => cells.slice(row * columns.length, (row + 1) * columns.length));
    console.log(JSON.stringify(rows));
  }
  process.exit(0);
}
setTimeout(run, 0);  // after the promises with which the worker sets itself up
