#!/bin/sh
# The published figures of the quantised formats against llama.cpp, 2 threads. About 10 minutes, 8 GB of memory.
# Usage: benchmarks/layer/formats.sh DIR      writes qwen3.json and mixtral.json into DIR
set -eu
out=${1:?usage: benchmarks/layer/formats.sh DIR}
mkdir -p "$out"
formats=q8_0,q4_0,q4_k,q6_k,gguf_mxfp4,int8_g128,int4_g32,int4_g128
cpumoe bench layer --shape qwen3-30b-a3b --format "$formats" --tokens 1,4,256 --threads 2 --peer llama_cpp \
  --json "$out/qwen3.json"
cpumoe bench layer --shape mixtral-8x7b --format "$formats" --tokens 1,4,256 --threads 2 --peer llama_cpp \
  --json "$out/mixtral.json"
