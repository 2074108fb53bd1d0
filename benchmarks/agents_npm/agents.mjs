// One conversation of tool calls with an official npm client. The script comes as JSON in the first argument; what happens
// goes to stdout, a JSON object a line: {"asked": n}, then {"called": n, "name", "arguments", "id"}, or {"failed": text}.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const script = JSON.parse(process.argv[2]);
const say = (event) => process.stdout.write(JSON.stringify(event) + "\n");

async function withOpenai(say) {
  const client = new OpenAI({ baseURL: `${script.url}/v1`, apiKey: "none", maxRetries: 0, timeout: script.limit_ms });
  const messages = [{ role: "user", content: script.question }];
  const tools = script.tools.map((tool) => ({
    type: "function",
    function: { name: tool.name, description: tool.description, parameters: tool.schema, strict: true },
  }));
  for (let number = 0; number < script.calls; number++) {
    say({ asked: number });
    const asked = {
      model: script.model, messages, tools, tool_choice: "required", parallel_tool_calls: false,
      max_tokens: script.max_tokens, seed: script.seed + number,
    };
    const completion = script.is_streamed
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    const { message, finish_reason: finish } = completion.choices[0];
    if (message.tool_calls?.length !== 1) throw new Error(`${message.tool_calls?.length} calls, finish reason ${finish}`);
    const call = message.tool_calls[0];
    say({ called: number, name: call.function.name, arguments: call.function.arguments, id: call.id });
    messages.push(message, { role: "tool", tool_call_id: call.id, content: script.results[number] });
  }
}

async function withResponses(say) {
  const client = new OpenAI({ baseURL: `${script.url}/v1`, apiKey: "none", maxRetries: 0, timeout: script.limit_ms });
  const input = [{ role: "user", content: script.question }];
  const tools = script.tools.map((tool) => ({
    type: "function", name: tool.name, description: tool.description, parameters: tool.schema, strict: true,
  }));
  for (let number = 0; number < script.calls; number++) {
    say({ asked: number });
    const asked = {
      model: script.model, input, tools, tool_choice: "required", parallel_tool_calls: false, store: false,
      max_output_tokens: script.max_tokens, seed: script.seed + number,
    };
    const response = script.is_streamed
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length !== 1) throw new Error(`${calls.length} calls, status ${response.status}`);
    const [call] = calls;
    say({ called: number, name: call.name, arguments: call.arguments, id: call.call_id });
    const result = { type: "function_call_output", call_id: call.call_id, output: script.results[number] };
    input.push({ type: "function_call", call_id: call.call_id, name: call.name, arguments: call.arguments }, result);
  }
}

async function withAnthropic(say) {
  const client = new Anthropic({ baseURL: script.url, apiKey: "none", maxRetries: 0, timeout: script.limit_ms });
  const messages = [{ role: "user", content: script.question }];
  const tools = script.tools.map((tool) => ({
    name: tool.name, description: tool.description, input_schema: tool.schema, strict: true,
  }));
  for (let number = 0; number < script.calls; number++) {
    say({ asked: number });
    const asked = {
      model: script.model, messages, tools, tool_choice: { type: "any", disable_parallel_tool_use: true },
      max_tokens: script.max_tokens, seed: script.seed + number,
    };
    const message = script.is_streamed
      ? await client.messages.stream(asked).finalMessage()
      : await client.messages.create(asked);
    const calls = message.content.filter((block) => block.type === "tool_use");
    if (calls.length !== 1) throw new Error(`${calls.length} calls, stop reason ${message.stop_reason}`);
    const [call] = calls;
    say({ called: number, name: call.name, arguments: JSON.stringify(call.input), id: call.id });
    const result = { type: "tool_result", tool_use_id: call.id, content: script.results[number] };
    messages.push({ role: "assistant", content: message.content }, { role: "user", content: [result] });
  }
}

try {
  await { openai: withOpenai, responses: withResponses, anthropic: withAnthropic }[script.dialect](say);
} catch (error) {
  say({ failed: `${error.name}: ${error.message}` });
  process.exitCode = 1;
}
