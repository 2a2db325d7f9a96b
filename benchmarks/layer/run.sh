#!/bin/sh
# The published layer figures: bf16, 2 threads, beside this machine's limits. About 10 minutes, 14 GB of memory.
# Usage: benchmarks/layer/run.sh DIR      writes decode.json, prefill.json and peers.json into DIR
set -eu
out=${1:?usage: benchmarks/layer/run.sh DIR}
mkdir -p "$out"
shapes=qwen3-30b-a3b,mixtral-8x7b,deepseek-v3-32e,gpt-oss-20b
cpumoe bench layer --shape "$shapes" --tokens 1,4 --threads 2 --json "$out/decode.json"
cpumoe bench layer --shape qwen3-30b-a3b,mixtral-8x7b --tokens 256,1024 --threads 2 --json "$out/prefill.json"
cpumoe bench layer --shape qwen3-30b-a3b,mixtral-8x7b --tokens 1,256 --threads 2 --peer transformers \
  --json "$out/peers.json"
