#!/usr/bin/env bash
# The tests and measurements that need a GPU, in stages of at most ten minutes:
#
#     bash benchmarks/gpu.sh OUTPUT STAGE...
#
# tests     all GPU tests, in three processes
# rounds    ms per round of the InCo setting, with and without engine.overlap_rounds, and the first round after a cold start
# tiles     which tiles of the kernels are fastest in the InCo setting
# fedimpro  ms per client step of FedImpro's ResNet-18, and convolutions on large maps
# methods   what methods cost
# peers     rounds of pfl-research, beside Motley and a loop by hand; needs its packages (benchmarks/RESULTS.md, Commands)
# cores     the speed of 1, 2, 4, 8 and 16 worker processes on the machine's CPU
# jobs      three runs one after another, and side by side; needs CIFAR-10 in MOTLEY_DATA
# campaign  the queue QUEUE of campaign/run.py, by default campaign/precision.txt; needs CIFAR-10, and takes several calls
#
# A stage goes on if one of its commands fails or runs out of time, and lists these commands at its end. Each command's
# output is in OUTPUT/NAME.log.
#
# SMOKE=1 tries this script on a CPU, with tiny models and data that come with Motley: every stage takes a minute or two.
# What cannot run there says so: GPU tests are collected and skipped, and kernels are left out.
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: bash benchmarks/gpu.sh OUTPUT STAGE...}" && cd "$1" && pwd)
shift
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python3}
SMOKE=${SMOKE:-}
work=${TMPDIR:-/tmp}/motley-campaign
failed=()
# What makes a round of five ResNets one that a CPU can run.
tiny=(--set 'model.sizes=["resnet10","resnet14"]' --set model.resnet.width=0.03125 --set federation.clients=4
  --set federation.clients_per_round=2 --set training.steps=2 --set engine.device=cpu)
# A study with data that come with Motley, in place of one with CIFAR-10.
smoke_study='inco-table2 --data digits --case "alpha 0.5" --method HeteroAvg --set training.rounds=5'

# run SECONDS NAME COMMAND...: run a command with a time limit, and keep its output.
run() {
  local seconds=$1 name=$2
  shift 2
  echo "== $name"
  local begin=$SECONDS status
  timeout --signal INT --kill-after 20 "$seconds" "$@" 2>&1 | tee "$out/$name.log" | tail -n 25
  status=${PIPESTATUS[0]}
  echo "== $name took $((SECONDS - begin)) s"
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
  local shard status pids=()
  for shard in 1 2 3; do
    timeout --signal INT --kill-after 20 480 "$PYTHON" -m pytest -m gpu tests/engine/test_gpu.py \
      tests/engine/test_gpu_tasks.py tests/engine/test_kernels.py --shard "$shard/3" --durations 15 -rs \
      >"$out/tests-$shard.log" 2>&1 &
    pids+=($!)
    # Processes that start at the same moment under MPS fail now and then.
    if [ "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then sleep 4; fi
  done
  if [ "$SMOKE" ]; then echo "GPU tests cannot run on a CPU: they are collected, and skipped"; fi
  for shard in 1 2 3; do
    wait "${pids[shard - 1]}"
    status=$?
    if [ "$status" -ne 0 ]; then failed+=("tests-$shard (status $status)"); fi
    echo "== tests-$shard"
    grep -E '^(FAILED|ERROR)' "$out/tests-$shard.log" | cut -c 1-300
    tail -n 1 "$out/tests-$shard.log"
  done
}

rounds() {
  local few=25 half=fp16 settings=()
  if [ "$SMOKE" ]; then
    few=2 half=fp32
    settings=("${tiny[@]}")
  fi
  run 240 rounds "$PYTHON" benchmarks/rounds.py --output "$out/rounds.json" --rounds "$few" --seconds 230 \
    --variant "$half: engine.precision=$half" \
    --variant "$half, overlap: engine.precision=$half; engine.overlap_rounds=true" \
    --variant "tf32: engine.precision=tf32" \
    --variant "tf32, overlap: engine.precision=tf32; engine.overlap_rounds=true" "${settings[@]}"
  run 150 first_round "$PYTHON" benchmarks/first_round.py --output "$out/first_round.json" --seconds 140 \
    --set "engine.precision=$half" "${settings[@]}"
}

tiles() {
  local precision
  if [ "$SMOKE" ]; then
    echo "tiles need a GPU"
    return
  fi
  for precision in fp16 tf32; do
    run 290 "tiles-$precision" "$PYTHON" -m benchmarks.tiles --precision "$precision" --seconds 260 \
      --output "$out/tiles-$precision.json"
  done
}

fedimpro() {
  local few=8 half=fp16 settings=() device=cuda
  if [ "$SMOKE" ]; then
    few=2 half=fp32 device=cpu
    settings=("${tiny[@]}" --set 'model.sizes=["resnet10"]')
  fi
  run 200 fedimpro "$PYTHON" benchmarks/rounds.py --preset fedimpro-cifar10 --output "$out/fedimpro.json" \
    --rounds "$few" --seconds 190 --set method.name=fedavg --set engine.slots=5 "${settings[@]}" \
    --variant "kernels: engine.precision=$half" \
    --variant "without conv: engine.precision=$half; engine.kernels=['augment','norm','optimizer','pool','stem']" \
    --variant "compiled: engine.precision=$half; engine.compile=true"
  run 350 large_maps "$PYTHON" -m benchmarks.large_maps --output "$out/large_maps.json" --seconds 340 --device "$device"
}

methods() {
  local names=fedavg,fedprox,fednova,scaffold,feddyn,fedlc,nested,moon,fedspeed,fedin,fedimpro,HeteroFL,FedRep,Ditto,fedavg
  local settings=(--rounds 8 --warm-up 6 --methods "$names")
  if [ "$SMOKE" ]; then settings=(--rounds 1 --warm-up 1 --methods fedavg,scaffold --smoke); fi
  run 500 methods "$PYTHON" benchmarks/methods.py --output "$out/methods.json" "${settings[@]}"
}

peers() {
  local device=cuda settings=(--rounds 30 --repeats 2)
  if [ "$SMOKE" ]; then
    device=cpu
    settings=(--workloads mlp --rounds 2 --repeats 1)
  fi
  run 400 peers "$PYTHON" -m benchmarks.peers.pfl_research --device "$device" --json "$out/peers-pfl.json" "${settings[@]}"
}

cores() {
  local workers=(1 2 4 8 16) settings=()
  if [ "$SMOKE" ]; then
    workers=(1 2)
    settings=(--set training.epochs=1)
  fi
  run 300 cores "$PYTHON" benchmarks/cores.py --workers "${workers[@]}" --rounds 4 --repeats 2 "${settings[@]}" \
    --out "$out/cores.json"
}

jobs() {
  start_mps
  local count folder study=(campaign/precision.toml --method fp16 --set training.rounds=60)
  if [ "$SMOKE" ]; then eval "study=($smoke_study --scale full)"; fi
  # In a new folder, because finished runs are not repeated.
  folder=$(mktemp -d)
  for count in 1 3; do
    run 280 "jobs-$count" "$PYTHON" -m motley study "${study[@]}" --jobs "$count" --out "$folder/$count"
  done
  rm -rf "$folder"
}

campaign() {
  start_mps
  local queue=${QUEUE:-campaign/precision.txt}
  if [ "$SMOKE" ]; then
    work=$out/motley-campaign queue=$out/queue.txt
    echo "$smoke_study" >"$queue"
  fi
  # Results are kept beside the runs, so that the next call continues, and are packed into one file.
  run 570 campaign "$PYTHON" campaign/run.py "$queue" --work "$work" --results "$work/results" --jobs 3 --seconds 500
  if [ -d "$work/results" ]; then
    tar -czf "$out/results.tgz" -C "$work" results
  else
    failed+=("results.tgz (there are no results)")
  fi
}

stages="tests rounds tiles fedimpro methods peers cores jobs campaign"
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
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY # the next stage may not want MPS
  echo "== stage $stage took $((SECONDS - begin)) s"
done
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
