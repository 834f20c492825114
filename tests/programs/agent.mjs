// An agent in another language, without any library of ours: it knows a base URL, a key and a model.
const { OPENAI_BASE_URL: base, OPENAI_API_KEY: key, OPENAI_MODEL: model } = process.env;
const question = process.argv[2];

async function post(path, body, headers = {}, url = base) {
  const response = await fetch(url + path, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}`, ...headers },
    body: JSON.stringify({ model, ...body }),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response;
}

const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "multiply", parameters } }];

// A loop with a tool, streamed.
const messages = [{ role: "user", content: question }];
for (;;) {
  const response = await post("/chat/completions", { messages, tools, stream: true });
  const message = { role: "assistant", content: "", tool_calls: [] };
  for (const line of (await response.text()).split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const { delta } = JSON.parse(line.slice(6)).choices[0];
    message.content += delta.content ?? "";
    message.tool_calls.push(...(delta.tool_calls ?? []));
  }
  messages.push(message);
  if (message.tool_calls.length === 0) {
    delete message.tool_calls;
    break;
  }
  for (const { id, function: call } of message.tool_calls) {
    const { a, b } = JSON.parse(call.arguments);
    messages.push({ role: "tool", tool_call_id: id, content: String(a * b) });
  }
}
const answer = messages.at(-1).content;

// A second agent, named in the URL, and a third, named by a header, through the Responses API.
const judged = await post("/chat/completions", { messages: [{ role: "user", content: `Is it ${answer}?` }] }, {},
  base.replace(/\/v1$/, "/a/judge/v1"));
const response = await post("/responses", { input: "Say it kindly." }, { "x-agl-agent": "speaker" });
const spoken = (await response.json()).output[0].content[0].text;
console.log(JSON.stringify({ answer, verdict: (await judged.json()).choices[0].message.content, spoken }));
