#!/usr/bin/env bash
# Stage 3: PPO with a reward model. Further words are further options of train_prompts.py.
#
#   PRETRAIN=coati RM_PATH=rm PROMPT_DATASET=prompt.json PRETRAIN_DATASET=data.json train_prompts.sh --kl_coef 0.05
#
#   PRETRAIN          the folder of the model of stage 1, which has to be given
#   RM_PATH           the folder of the reward model of stage 2; default: rm
#   PROMPT_DATASET    prompts, as of generate_prompt_dataset.py; default: made-up sums, to see it run
#   PRETRAIN_DATASET  instructions and answers that are learned beside; default: none
#   SAVE_PATH         the folder of the trained model; default: ppo
#   MODEL             gpt2, bloom, opt, llama or auto; default: auto
#   STRATEGY          default: colossalai_zero2
#   NPROC             processes, one for each device; default: 1
set -euo pipefail

: "${PRETRAIN:?give the folder of a model of save_pretrained}"
SAVE_PATH=${SAVE_PATH:-ppo}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [[ -z ${PROMPT_DATASET:-} ]]; then
    PROMPT_DATASET=$SAVE_PATH/made_up.json
    python "$HERE/make_toy_dataset.py" --stage prompts --save_path "$PROMPT_DATASET"
fi

colossalai run --nproc_per_node "${NPROC:-1}" "$HERE/train_prompts.py" \
    --pretrain "$PRETRAIN" --model "${MODEL:-auto}" --strategy "${STRATEGY:-colossalai_zero2}" \
    --rm_path "${RM_PATH:-rm}" --prompt_dataset "$PROMPT_DATASET" \
    ${PRETRAIN_DATASET:+--pretrain_dataset "$PRETRAIN_DATASET"} --save_path "$SAVE_PATH" "$@"
