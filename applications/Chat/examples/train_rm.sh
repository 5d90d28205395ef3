#!/usr/bin/env bash
# Stage 2: a reward model from comparisons. Further words are further options of train_reward_model.py.
#
#   PRETRAIN=coati DATASET=pairs.jsonl train_rm.sh --max_epochs 1
#
#   PRETRAIN   a folder of save_pretrained, such as that of stage 1, which has to be given
#   DATASET    rows of a chosen and a rejected answer; default: made-up sums, to see it run
#   SUBSET     of a data set by name, where it has several
#   SAVE_PATH  the folder of the reward model; default: rm
#   MODEL      gpt2, bloom, opt, llama or auto; default: auto
#   STRATEGY   default: colossalai_zero2
#   NPROC      processes, one for each device; default: 1
set -euo pipefail

: "${PRETRAIN:?give the folder of a model of save_pretrained}"
SAVE_PATH=${SAVE_PATH:-rm}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [[ -z ${DATASET:-} ]]; then
    DATASET=$SAVE_PATH/made_up.json
    python "$HERE/make_toy_dataset.py" --stage preference --save_path "$DATASET"
fi

colossalai run --nproc_per_node "${NPROC:-1}" "$HERE/train_reward_model.py" \
    --pretrain "$PRETRAIN" --model "${MODEL:-auto}" --strategy "${STRATEGY:-colossalai_zero2}" \
    --dataset "$DATASET" ${SUBSET:+--subset "$SUBSET"} --save_path "$SAVE_PATH" --loss_fn log_exp "$@"
