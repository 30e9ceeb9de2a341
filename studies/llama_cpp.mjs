// Greedy ids of prompts by llama.cpp, at most `rows` sequences at a time; llama_cpp.py runs it.
import {readFileSync} from "node:fs";
import {getLlama} from "node-llama-cpp";

const [file, prompts, newTokens, rows, threads] = process.argv.slice(2);
const waiting = [...JSON.parse(readFileSync(prompts)).entries()];
const context = 64 * Math.ceil((Math.max(...waiting.map(([_, ids]) => ids.length)) + +newTokens) / 64);
process.execArgv = [];                       // --input-type would break the process that tests the library
const llama = await getLlama({gpu: false, build: "never", maxThreads: +threads});
const model = await llama.loadModel({modelPath: file});
const slots = await model.createContext({sequences: +rows, contextSize: context, threads: +threads});
const answers = [];

async function work(sequence) {
    for (let next; (next = waiting.shift());) {
        const [i, ids] = next;
        answers[i] = [];
        await sequence.clearHistory();
        for await (const id of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true}))
            if (answers[i].push(id) >= newTokens || model.isEogToken(id))
                break;
    }
}

const sequences = Array.from({length: +rows}, () => slots.getSequence());
const began = performance.now();
await Promise.all(sequences.map(work));
console.log(JSON.stringify({ids: answers, seconds: (performance.now() - began) / 1000}));
process.exit(0);
