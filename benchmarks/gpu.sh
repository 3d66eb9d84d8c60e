#!/usr/bin/env bash
# The tests and measurements that need a GPU, in stages of at most ten minutes:
#
#     bash benchmarks/gpu.sh OUTPUT STAGE...
#
# tests     all GPU tests, in three processes
# rounds    ms per round of the InCo setting, with and without engine.overlap_rounds, and the first round after a cold start
# fedimpro  ms per client step of FedImpro's ResNet-18, and convolutions on large maps
# methods   what methods cost
# cores     the speed of 1, 2, 4, 8 and 16 worker processes on the machine's CPU
# jobs      three runs one after another, and side by side; needs CIFAR-10 in MOTLEY_DATA
# campaign  the queue QUEUE of campaign/run.py, by default campaign/precision.txt; needs CIFAR-10, and takes several calls
#
# A stage goes on if one of its commands fails or runs out of time, and lists these commands at its end. Each command's
# output is in OUTPUT/NAME.log. SMOKE=1 shortens the stages that a CPU can run, to try this script.
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: bash benchmarks/gpu.sh OUTPUT STAGE...}" && cd "$1" && pwd)
shift
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python3}
SMOKE=${SMOKE:-}
work=${TMPDIR:-/tmp}/motley-campaign
failed=()

# run SECONDS NAME COMMAND...: run a command with a time limit, and keep its output.
run() {
  local seconds=$1 name=$2
  shift 2
  echo "== $name"
  timeout --signal INT --kill-after 20 "$seconds" "$@" 2>&1 | tee "$out/$name.log" | tail -n 25
  local status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then failed+=("$name (status $status)"); fi
}

# Under NVIDIA's MPS, kernels of several processes run at the same time.
start_mps() {
  command -v nvidia-cuda-mps-control >/dev/null || return 0
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
  nvidia-cuda-mps-control -d 2>/dev/null || true # it may be running already
}

tests() {
  start_mps
  local shard
  for shard in 1 2 3; do
    timeout --signal INT --kill-after 20 480 "$PYTHON" -m pytest -m gpu tests/engine/test_gpu.py \
      tests/engine/test_gpu_tasks.py tests/engine/test_kernels.py --shard "$shard/3" -q --durations 15 \
      >"$out/tests-$shard.log" 2>&1 &
    sleep 4 # processes that start at the same moment under MPS fail now and then
  done
  wait
  for shard in 1 2 3; do
    grep -E '^(FAILED|ERROR)|passed|failed' "$out/tests-$shard.log" | cut -c 1-300 || true
  done
}

rounds() {
  local few=25 half=fp16 settings=()
  if [ "$SMOKE" ]; then
    few=2 half=fp32
    settings=(--set 'model.sizes=["resnet10","resnet14"]' --set model.resnet.width=0.03125 --set federation.clients=4
      --set federation.clients_per_round=2 --set training.steps=2 --set engine.device=cpu)
  fi
  run 240 rounds "$PYTHON" benchmarks/rounds.py --output "$out/rounds.json" --rounds "$few" --seconds 230 \
    --variant "$half: engine.precision=$half" \
    --variant "$half, overlap: engine.precision=$half; engine.overlap_rounds=true" \
    --variant "tf32: engine.precision=tf32" \
    --variant "tf32, overlap: engine.precision=tf32; engine.overlap_rounds=true" "${settings[@]}"
  run 150 first_round "$PYTHON" benchmarks/first_round.py --output "$out/first_round.json" --seconds 140 \
    --set "engine.precision=$half" "${settings[@]}"
}

fedimpro() {
  run 200 fedimpro "$PYTHON" benchmarks/rounds.py --preset fedimpro-cifar10 --output "$out/fedimpro.json" --rounds 8 \
    --seconds 190 --set method.name=fedavg --set engine.slots=5 \
    --variant "kernels: engine.precision=fp16" \
    --variant "without conv: engine.precision=fp16; engine.kernels=['augment','norm','optimizer','pool','stem']" \
    --variant "compiled: engine.precision=fp16; engine.compile=true"
  run 350 large_maps "$PYTHON" -m benchmarks.large_maps --output "$out/large_maps.json" --seconds 340
}

methods() {
  local names=fedavg,fedprox,fednova,scaffold,feddyn,fedlc,nested,moon,fedspeed,fedin,fedimpro,HeteroFL,FedRep,Ditto,fedavg
  local settings=(--rounds 8 --warm-up 6 --methods "$names")
  if [ "$SMOKE" ]; then settings=(--rounds 1 --warm-up 1 --methods fedavg,scaffold --smoke); fi
  run 500 methods "$PYTHON" benchmarks/methods.py --output "$out/methods.json" "${settings[@]}"
}

cores() {
  local workers=(1 2 4 8 16)
  if [ "$SMOKE" ]; then workers=(1 2); fi
  run 300 cores "$PYTHON" benchmarks/cores.py --workers "${workers[@]}" --rounds 4 --repeats 2 --out "$out/cores.json"
}

jobs() {
  start_mps
  local count
  for count in 1 3; do
    run 280 "jobs-$count" "$PYTHON" -m motley study campaign/precision.toml --method fp16 --set training.rounds=60 \
      --jobs "$count" --out "/tmp/jobs-$count"
  done
}

campaign() {
  start_mps
  # Results are kept beside the runs, so that the next call continues, and are packed into one file.
  run 570 campaign "$PYTHON" campaign/run.py "${QUEUE:-campaign/precision.txt}" --work "$work" --results "$work/results" \
    --jobs 3 --seconds 500
  tar -czf "$out/results.tgz" -C "$work" results
}

stages="tests rounds fedimpro methods cores jobs campaign"
for stage in "$@"; do
  case " $stages " in
    *" $stage "*) ;;
    *)
      echo "unknown stage '$stage'; stages: $stages" >&2
      exit 2
      ;;
  esac
done
for stage in "$@"; do
  begin=$SECONDS
  "$stage"
  echo "== stage $stage took $((SECONDS - begin)) s"
done
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
