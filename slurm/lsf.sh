#!/usr/bin/env bash
# Data-parallel training with DSSP under LSF: rank 0 is the server, every other rank a worker. Submit: bsub <lsf.sh
#BSUB -J stalempi-dssp
#BSUB -n 10 -R "span[ptile=5]" -gpu "num=4"
#BSUB -W 04:00
#BSUB -o %J.out
#BSUB -wa USR1 -wt 2
#BSUB -Q "75"

OUT=$LS_SUBCWD/runs/$LSB_JOBID
PROGRAM=(stalempi-bench train
    --policy dssp --dataset imagefolder --data-dir "$HOME/data/cifar10" --model resnet110 --batch-size 128 --lr 0.05)

# Nothing below needs editing: LSF says on which nodes, how many ranks on each. Two minutes before the time is up, LSF
# warns every process of the job; the ranks write a checkpoint and end with code 75, and LSF queues the job again.
set -euo pipefail
mkdir -p "$OUT"
# shellcheck disable=SC2016 # the ranks expand it
rank='r=${PMIX_RANK:-$PMI_RANK}; exec "$@" >>"$0/rank-$r.out" 2>>"$0/rank-$r.err"'
trap : USR1
mpirun --bind-to none -n "$LSB_DJOB_NUMPROC" bash -c "$rank" "$OUT" "${PROGRAM[@]}" --out "$OUT" \
    --checkpoint-dir "$OUT/checkpoints" --checkpoint-every 60s --resume auto & job=$!
while code=0; wait "$job" || code=$?; kill -0 "$job" 2>/dev/null; do :; done
exit "$code"
