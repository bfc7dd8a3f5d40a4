#!/usr/bin/env bash
# The commands behind the results of GPUs, in parts that take an H200 ten minutes at most.
#
#   benchmarks/gpu_results.sh PART [FOLDER]        # PART: one of the names below; several with commas between
#
# Files are written to FOLDER, or where the committed ones are. Peers are measured where they are installed:
# bitsandbytes, flashoptim, heavyball, torchao, torch-optimi. After it, benchmarks/render.py and studies.render draw
# the pages.
# LIMIT=N cuts each command off after N seconds; those that take --resume go on in the next call.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3} limit=${LIMIT:-600}
bench=${2:-benchmarks/results} folder=${2:-}
mkdir -p "$bench"

run() { # a command of Python's; what it takes is told, and the next one follows in any case
    local begun=$SECONDS
    timeout -s INT -k 10 "$limit" "$python" "$@" || echo "exit status $? of: $*"
    echo "$((SECONDS - begun)) s: $*"
}
study() { run -m "studies.$1.run" --device cuda --resume --out "${folder:-studies/$1/results}/$1_h200.json" "${@:2}"; }
torchrun() { OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} run -m torch.distributed.run --nproc-per-node "$GPUS" "$@"; }

part() {
    case $1 in
    tests) run -m pytest -q -p no:benchmark -n 8 -m gpu tests/optim tests/scaling tests/kernels tests/gauges \
        tests/linear tests/nn tests/distributed tests/trainers tests/benchmarks tests/cli ;;
    sanitize) for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool $tool "$python" -m pytest -q -m gpu tests/optim/test_fused_steps.py
    done ;;
    optimizers) run -m narrowgauge.cli bench optimizers --device cuda --peers --lists big --seconds 0.1 \
        --json "$bench/optimizers_h200.json" ;;
    optimizers_models) run -m narrowgauge.cli bench optimizers --device cuda --peers --lists gpt2-medium,vit-huge \
        --seconds 0.1 --json "$bench/optimizers_models_h200.json" ;;
    table_5) run -m narrowgauge.cli bench optimizers --device cuda --peers --lists big --seconds 0.1 \
        --only "AdamW 8bit,AdamW fp32,AdamW fused,SGD,LAMB,LARS" --json "$bench/table_5_h200.json" ;;
    linear) run -m narrowgauge.cli bench linear --device cuda --tune --json "$bench/linear_h200.json" ;;
    layers) run benchmarks/bench_layers.py --device cuda --quick --resume \
        --json "$bench/linear_h200.json" ;;
    language) run benchmarks/bench_language.py --models llama-1b --curves 300 --resume \
        --json "$bench/language_h100.json" ;;
    language_large) run benchmarks/bench_language.py --models llama-8b,gpt2-large --rounds 4 --steps 4 --resume \
        --json "$bench/language_h100.json" ;;
    clip) run benchmarks/bench_clip.py --compile --graph --models vit-h-14,vit-l-14,vit-b-16 --resume \
        --json "$bench/clip_h200.json" ;;
    clip_filter) run benchmarks/bench_clip.py --compile --graph --filter --models vit-b-16,vit-l-14 --resume \
        --json "$bench/clip_filter_h200.json" ;;
    peers) run -m narrowgauge.cli bench linear --device cuda --peers \
        --shapes 32768x1280x5120,16384x4096x16384 --json "$bench/peers_linear_h200.json" ;;
    watch) run benchmarks/bench_watch.py --optimizers torch adamw8bit --ways all --rounds 13 \
        --json "$bench/watch_h200.json" ;;
    memory) run benchmarks/bench_memory.py --seconds 400 --json "$bench/memory_h200.json" ;;
    hold) run benchmarks/bench_hold.py --json "$bench/hold_h200.json" ;;
    offload) run benchmarks/bench_offload.py --lists 1b 7b --json "$bench/offload_h200.json" ;;
    collage_training) study collage_training --jobs 2 --seconds 500 ;;
    collage_throughput) study collage_throughput --seconds 400 ;;
    adam_variants) study adam_variants --jobs 8 --seconds 500 ;;
    clip_precision) study clip_precision --jobs 8 --seconds 500 ${EMOJI:+--data "$EMOJI"} ;;
    stability) study stability --jobs 8 --seconds 480 ${EMOJI:+--data "$EMOJI"} ;;
    loss_scaling) study loss_scaling --seconds 450 ;;
    training_magnitudes) study training_magnitudes ;;
    compressed_training) study compressed_training --seconds 240 ;;
    data_parallel) torchrun benchmarks/bench_data_parallel.py --json "$bench/data_parallel_${GPUS}_h200.json" ;;
    compressed) run benchmarks/bench_compressed.py --ranks "$GPUS" --json "$bench/compressed_h200.json" ;;
    several) run -m pytest -q -p no:benchmark -n 4 tests/distributed \
        -k "gpus or nccl or compressed_ranks or checkpoint_ranks" ;;
    *) echo "gpu_results.sh: got '$1', takes one of: $(grep -oE '^    [a-z_]+\)' "$0" | tr -d ' )' | xargs)" >&2
       return 2 ;;
    esac
}

GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
for name in $(tr , ' ' <<<"${1:-}"); do part "$name" || exit; done
[[ -n ${1:-} ]] || part ''
