import OpenAI, {toFile} from 'openai';
import {MODEL, URL, joined, report} from './report.mjs';

const client = new OpenAI({baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 0});
const messages = [{role: 'user', content: 'Say hello to the world.'}];
const ask = {model: MODEL, messages, temperature: 0, max_tokens: 8};
const tools = [{type: 'function', function: {name: 'look', parameters: {type: 'object', properties: {at: {type: 'string'}}}}}];
const format = {type: 'json_schema', json_schema: {name: 'a', schema: {type: 'object', properties: {a: {type: 'boolean'}}, required: ['a'], additionalProperties: false}}};
const chatKind = (part) => Object.keys(part.choices[0]?.delta ?? {usage: 0}).join();
const chatText = (part) => part.choices[0]?.delta?.content;

await report({
  chat: () => client.chat.completions.create(ask),
  chat_two: () => client.chat.completions.create({...ask, n: 2, temperature: 0.1, seed: 1}),
  chat_logprobs: () => client.chat.completions.create({...ask, logprobs: true, top_logprobs: 2, max_tokens: 2}),
  chat_stream: async () =>
    joined(await client.chat.completions.create({...ask, stream: true, stream_options: {include_usage: true}}), chatKind, chatText),
  chat_helper: () => client.chat.completions.stream(ask).finalChatCompletion(),
  chat_tee: async () => {
    const [one, two] = (await client.chat.completions.create({...ask, stream: true})).tee();
    return [await joined(one, chatKind, chatText), await joined(two, chatKind, chatText)];
  },
  chat_tools: () => client.chat.completions.create({...ask, tools}),
  chat_tool_required: () => client.chat.completions.create({...ask, tools, tool_choice: 'required', max_tokens: 32}),
  chat_json: () => client.chat.completions.create({...ask, response_format: format, max_tokens: 32}),
  chat_parse: () => client.chat.completions.parse({...ask, response_format: format, max_tokens: 32}),
  chat_with_response: async () => {
    const {data, response} = await client.chat.completions.create(ask).withResponse();
    return {data, status: response.status, type: response.headers.get('content-type')};
  },
  chat_many: () => Promise.all(Array.from({length: 12}, () => client.chat.completions.create({...ask, max_tokens: 1}).then((one) => one.choices.length))),
  chat_aborted: async () => {
    const controller = new AbortController();
    const stream = await client.chat.completions.create({...ask, max_tokens: 500, stream: true}, {signal: controller.signal});
    for await (const _ of stream) controller.abort();
    return 'ended';
  },
  chat_left: async () => {
    for await (const part of await client.chat.completions.create({...ask, max_tokens: 500, stream: true})) return part.object;
  },
  completion: () => client.completions.create({model: MODEL, prompt: 'Once', temperature: 0, max_tokens: 8}),
  completions: () => client.completions.create({model: MODEL, prompt: ['Once', 'Twice'], temperature: 0, max_tokens: 4}),
  completion_stream: async () =>
    joined(await client.completions.create({model: MODEL, prompt: 'Once', temperature: 0, max_tokens: 8, stream: true}),
      (part) => part.object, (part) => part.choices[0]?.text),
  responses: () => client.responses.create({model: MODEL, input: 'Hello', temperature: 0, max_output_tokens: 16, store: false}),
  responses_stream: async () =>
    joined(await client.responses.create({model: MODEL, input: 'Hello', temperature: 0, max_output_tokens: 16, stream: true}),
      (event) => event.type, (event) => (event.type === 'response.output_text.delta' ? event.delta : '')),
  models: () => client.models.list(),
  model: () => client.models.retrieve(MODEL),
  embeddings: () => client.embeddings.create({model: MODEL, input: 'a'}),
  files: () => client.files.list(),
  upload: async () => client.files.create({file: await toFile(Buffer.alloc(100_000, 'x'), 'a.txt'), purpose: 'batch'}),
  transcription: async () => client.audio.transcriptions.create({model: MODEL, file: await toFile(Buffer.alloc(3_000_000), 'a.wav')}),
  chat_after_upload: () => client.chat.completions.create({...ask, max_tokens: 1}),
  unknown_model: () => client.chat.completions.create({...ask, model: 'nobody'}),
  unknown_model_stream: () => client.chat.completions.create({...ask, model: 'nobody', stream: true}),
  no_messages: () => client.chat.completions.create({model: MODEL}),
  wrong_temperature: () => client.chat.completions.create({...ask, temperature: -3}),
  too_long: () => client.chat.completions.create({...ask, messages: [{role: 'user', content: 'long '.repeat(5000)}]}),
  slash_behind_base: () => new OpenAI({baseURL: `${URL}/v1/`, apiKey: 'none'}).models.list(),
});
