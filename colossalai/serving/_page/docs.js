"use strict";
// Renders /openapi.json: each route with its fields and answers, and a form that sends a request.
// Texts of the description go into the page as text, never as markup.

const byId = (id) => document.getElementById(id);

function element(name, text, children = []) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function headers(more = {}) {
  const key = byId("key").value;
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function resolve(description, schema) {
  return schema && schema.$ref ? description.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const branches = schema.anyOf || schema.oneOf;
  if (branches) return branches.map(typeOf).join(" | ");
  return schema.type === "array" ? `list of ${typeOf(schema.items)}` : schema.type || "any";
}

function fields(schema) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const needed = (schema.required || []).includes(name) ? ", needed" : "";
    return element("tr", null, [
      element("td", name), element("td", typeOf(field) + needed), element("td", field.description || ""),
    ]);
  });
  return element("table", null, rows);
}

async function send(method, path, body, output) {
  output.textContent = "";
  const began = performance.now();
  try {
    const answer = await fetch(path, {
      method, headers: headers(body === null ? {} : { "Content-Type": "application/json" }), body,
    });
    output.textContent = `${answer.status} ${answer.headers.get("x-request-id") || ""}\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  } catch (error) {
    output.textContent += String(error);
  }
  output.textContent += `\n${((performance.now() - began) / 1000).toFixed(3)} s`;
}

function form(method, path, schema) {
  const output = element("pre", "");
  const place = element("input", null);
  place.value = path;
  const text = schema ? element("textarea", null) : null;
  if (text) text.value = JSON.stringify((schema.examples || [{}])[0], null, 2);
  const button = element("button", "Send");
  button.type = "button";
  button.addEventListener("click", () => send(method, place.value, text ? text.value : null, output));
  const parts = path.includes("{") ? [element("p", null, [place])] : [];
  return element("div", null, [...parts, ...(text ? [text] : []), element("p", null, [button]), output]);
}

function route(description, path, method, operation) {
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const schema = content ? resolve(description, content.schema) : null;
  const answers = Object.entries(operation.responses).map(([status, answer]) => {
    const kinds = Object.entries(answer.content || {}).map(([kind, value]) => `${kind}: ${typeOf(value.schema)}`);
    return element("tr", null, [
      element("td", status), element("td", answer.description || ""), element("td", kinds.join("; ")),
    ]);
  });
  return element("details", null, [
    element("summary", null, [element("b", method.toUpperCase()), element("code", path)]),
    element("p", operation.description || ""),
    ...(schema ? [element("h3", "Fields"), fields(schema)] : []),
    element("h3", "Answers"), element("table", null, answers),
    element("h3", "Try it"), form(method.toUpperCase(), path, schema),
  ]);
}

async function load() {
  byId("problem").textContent = "";
  const answer = await fetch("/openapi.json", { headers: headers() });
  if (!answer.ok) {
    byId("problem").textContent = (await answer.json()).error.message;
    return;
  }
  const description = await answer.json();
  const made = [];
  for (const [path, operations] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      made.push(route(description, path, method, operation));
    }
  }
  for (const [name, schema] of Object.entries(description.components.schemas)) {
    if (schema.properties) {
      made.push(element("details", null, [element("summary", null, [element("code", name)]), fields(schema)]));
    }
  }
  byId("routes").replaceChildren(...made);
}

byId("load").addEventListener("click", load);
load();
