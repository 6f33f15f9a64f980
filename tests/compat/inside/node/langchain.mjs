import {ChatOpenAI} from '@langchain/openai';
import {z} from 'zod';
import {MODEL, URL, joined, report} from './report.mjs';

const options = {model: MODEL, apiKey: 'none', temperature: 0, maxTokens: 16, maxRetries: 0, configuration: {baseURL: `${URL}/v1`}};
const chat = new ChatOpenAI(options);
const responses = new ChatOpenAI({...options, useResponsesApi: true});
const schema = z.object({a: z.boolean()});
const shown = ({content, tool_calls, usage_metadata}) => ({content, calls: tool_calls?.length, usage_metadata});
const streamed = async (model) => joined(await model.stream('Hello'), (part) => part.constructor.name, (part) => part.text);

await report({
  invoke: async () => shown(await chat.invoke('Hello')),
  stream: async () => ({text: (await streamed(chat)).text}),
  batch: async () => (await chat.batch(['Hello', 'Goodbye'])).map((one) => one.content.length > 0),
  responses: async () => shown(await responses.invoke('Hello')),
  responses_stream: async () => ({text: (await streamed(responses)).text}),
  structured: () => chat.withStructuredOutput(schema, {method: 'jsonSchema'}).invoke('Hello'),
  structured_by_tool: () => chat.withStructuredOutput(schema, {method: 'functionCalling'}).invoke('Hello'),
  tools: async () => shown(await chat.bindTools([{name: 'look', description: 'Looks', schema}]).invoke('Hello')),
  unknown_model: () => new ChatOpenAI({...options, model: 'nobody'}).invoke('Hello'),
  too_long: () => chat.invoke('long '.repeat(5000)),
});
