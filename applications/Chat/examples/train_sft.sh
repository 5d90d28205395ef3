#!/usr/bin/env bash
# Stage 1: supervised fine-tuning. Further words are further options of train_sft.py.
#
#   PRETRAIN=path/to/model DATASET=data.json train_sft.sh --lr 1e-5
#
#   PRETRAIN   a folder of save_pretrained, which has to be given
#   DATASET    rows of instructions and answers; default: made-up sums, to see it run
#   SAVE_PATH  the folder of the trained model; default: coati
#   MODEL      gpt2, bloom, opt, llama or auto; default: auto
#   STRATEGY   default: colossalai_zero2
#   NPROC      processes, one for each device; default: 1
set -euo pipefail

: "${PRETRAIN:?give the folder of a model of save_pretrained}"
SAVE_PATH=${SAVE_PATH:-coati}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [[ -z ${DATASET:-} ]]; then
    DATASET=$SAVE_PATH/made_up.json
    python "$HERE/make_toy_dataset.py" --stage sft --save_path "$DATASET"
fi

colossalai run --nproc_per_node "${NPROC:-1}" "$HERE/train_sft.py" \
    --pretrain "$PRETRAIN" --model "${MODEL:-auto}" --strategy "${STRATEGY:-colossalai_zero2}" \
    --dataset "$DATASET" --save_path "$SAVE_PATH" --max_epochs 1 \
    --batch_size 4 --accumulation_steps 8 --lr 2e-5 --grad_checkpoint "$@"
