#!/usr/bin/env bash
# Data-parallel training with DSSP under PBS or Torque: rank 0 is the server, every other rank a worker.
#PBS -N stalempi-dssp
#PBS -l select=2:ncpus=20:mpiprocs=5:ngpus=4
#PBS -l walltime=04:00:00
#PBS -r y
#PBS -j oe

OUT=$PBS_O_WORKDIR/runs/$PBS_JOBID
PROGRAM=(stalempi-bench train
    --policy dssp --dataset imagefolder --data-dir "$HOME/data/cifar10" --model resnet110 --batch-size 128 --lr 0.05)

# Nothing below needs editing: PBS says on which nodes, how many ranks on each. A job that PBS starts again goes on from
# its checkpoint; for one whose time was up, submit it again with the old folder as OUT.
set -euo pipefail
cd "$PBS_O_WORKDIR"
mkdir -p "$OUT"
# shellcheck disable=SC2016 # the ranks expand it
rank='r=${PMIX_RANK:-$PMI_RANK}; exec "$@" >>"$0/rank-$r.out" 2>>"$0/rank-$r.err"'
exec mpirun --bind-to none -n "$(wc -l <"$PBS_NODEFILE")" bash -c "$rank" "$OUT" "${PROGRAM[@]}" --out "$OUT" \
    --checkpoint-dir "$OUT/checkpoints" --checkpoint-every 60s --resume auto
