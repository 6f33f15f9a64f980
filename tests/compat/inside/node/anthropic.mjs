import Anthropic from '@anthropic-ai/sdk';
import {MODEL, URL, joined, report} from './report.mjs';

const client = new Anthropic({baseURL: URL, apiKey: 'none', maxRetries: 0});
const ask = {model: MODEL, max_tokens: 8, temperature: 0, messages: [{role: 'user', content: 'Say hello.'}]};
const tools = [{name: 'look', description: 'Looks', input_schema: {type: 'object', properties: {at: {type: 'string'}}}}];
const kindOf = (event) => event.type;
const textOf = (event) => event.delta?.text;

await report({
  message: () => client.messages.create(ask),
  message_system: () => client.messages.create({...ask, system: [{type: 'text', text: 'Be brief.', cache_control: {type: 'ephemeral'}}]}),
  message_stop: () => client.messages.create({...ask, stop_sequences: ['e']}),
  message_stream: async () => joined(await client.messages.create({...ask, stream: true}), kindOf, textOf),
  message_helper: () => client.messages.stream(ask).finalMessage(),
  message_tools: () => client.messages.create({...ask, tools}),
  message_tool_result: () => client.messages.create({...ask, tools, messages: [
    ...ask.messages,
    {role: 'assistant', content: [{type: 'tool_use', id: 'toolu_1', name: 'look', input: {at: 'x'}}]},
    {role: 'user', content: [{type: 'tool_result', tool_use_id: 'toolu_1', content: 'nothing'}]},
  ]}),
  message_beta: () => client.beta.messages.create({...ask, betas: ['prompt-caching-2024-07-31']}),
  message_many: () => Promise.all(Array.from({length: 12}, () => client.messages.create({...ask, max_tokens: 1}).then((one) => one.type))),
  message_left: async () => {
    for await (const event of await client.messages.create({...ask, max_tokens: 500, stream: true})) return event.type;
  },
  count_tokens: () => client.messages.countTokens({model: MODEL, messages: ask.messages}),
  models: () => client.models.list(),
  model: () => client.models.retrieve(MODEL),
  batches: () => client.messages.batches.list(),
  unknown_model: () => client.messages.create({...ask, model: 'nobody'}),
  no_messages: () => client.messages.create({...ask, messages: []}),
  too_long: () => client.messages.create({...ask, messages: [{role: 'user', content: 'long '.repeat(5000)}]}),
});
