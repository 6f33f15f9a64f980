import {createOpenAI} from '@ai-sdk/openai';
import {Output, embed, generateText, streamText, tool} from 'ai';
import {z} from 'zod';
import {MODEL, URL, report} from './report.mjs';

const provider = createOpenAI({baseURL: `${URL}/v1`, apiKey: 'none'});
const forms = {chat: provider.chat(MODEL), responses: provider.responses(MODEL), completion: provider.completion(MODEL)};
const common = {prompt: 'Say hello.', temperature: 0, maxOutputTokens: 16, maxRetries: 0};
const tools = {look: tool({description: 'Looks', inputSchema: z.object({at: z.string()}), execute: async () => 'nothing'})};
const shown = (one) => ({text: one.text, finishReason: one.finishReason, usage: one.usage, toolCalls: one.toolCalls?.length});

async function streamed(options) {
  const result = streamText({...options, onError: () => {}});
  const kinds = new Set();
  let text = '';
  for await (const part of result.fullStream) {
    kinds.add(part.type);
    if (part.type === 'text-delta') text += part.text;
    if (part.type === 'error') throw part.error;
  }
  return {kinds: [...kinds], text, finishReason: await result.finishReason, usage: await result.usage};
}

const calls = {};
for (const [form, model] of Object.entries(forms)) {
  calls[`${form}_text`] = async () => shown(await generateText({...common, model}));
  calls[`${form}_stream`] = () => streamed({...common, model});
  calls[`${form}_unknown_model`] = () => generateText({...common, model: provider[form]('nobody')});
  calls[`${form}_unknown_model_stream`] = () => streamed({...common, model: provider[form]('nobody')});
  calls[`${form}_too_long`] = () => generateText({...common, model, prompt: 'long '.repeat(5000)});
}
const output = Output.object({schema: z.object({a: z.boolean()})});
calls.object = async () => (await generateText({...common, model: forms.chat, output, maxOutputTokens: 32})).output;
calls.tools = async () => shown(await generateText({...common, model: forms.chat, tools}));
calls.tool_required = async () => shown(await generateText({...common, model: forms.chat, tools, toolChoice: 'required', maxOutputTokens: 32}));
calls.embedding = () => embed({model: provider.embedding(MODEL), value: 'a', maxRetries: 0});
calls.aborted = async () => {
  const controller = new AbortController();
  const result = streamText({...common, model: forms.chat, maxOutputTokens: 500, abortSignal: controller.signal, onError: () => {}});
  for await (const part of result.fullStream) {
    if (part.type === 'text-delta') controller.abort();
    if (part.type === 'abort') return part.type;
  }
  return 'ended';
};
await report(calls);
