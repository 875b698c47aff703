#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the trainers of language models as a user does and looks at what they print.
#
# usage: language_ddp_test.sh learns|curve|resumes|stops|keeps|evaluates|whole|refuses PROGRAM RANKS DATA
#   learns    with the defaults, on the embedded data: the evaluation loss falls, what is trained changes, the base does not
#   curve     1, 2 and 4 ranks (RANKS: the largest), accumulation, uneven shares: the loss curve of one process
#   resumes   killed after a checkpoint and started again: the same bits as never interrupted
#   stops     SIGTERM: the adapters at the stop are those of its checkpoint; without one they are all there is
#   keeps     what an earlier run trained is not replaced by another run, only by its own continuation
#   evaluates run.mode=evaluate gives what training printed at its end, at another number of ranks too
#   whole     lora.rank=0 trains all parameters; the folder it saves is a base that evaluates the same
#   refuses   other bases and adapters, small vocabularies, nothing to evaluate: clear errors
set -u
scenario=$1 program=$2 ranks=$3 data=$4
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer_test_lib.sh"

case $(basename "$program") in
  lora_ddp)
    # Ragged: rows as long as their documents, and 97 of them to evaluate, which no number of ranks divides.
    model=(lora.rank=16 lora.alpha=32 tokens.layout=pad tokens.max_seq_len=140 tokens.long_documents=drop tokens.num_samples=400)
    dropout=(lora.dropout=0.05) no_dropout=(lora.dropout=0) bf16=(model.dtype=bf16 lora.dtype=bf16)
    ;;
  gpt2_ddp)
    model=(model.layers=2 model.hidden=32 model.heads=2 model.positions=64 tokens.max_seq_len=60 sample.max_new_tokens=20)
    dropout=(model.dropout=0.1) no_dropout=(model.dropout=0) bf16=(model.dtype=bf16)
    ;;
  bert_ddp)
    model=(model.layers=2 model.hidden=32 model.heads=2 model.positions=64 tokens.max_seq_len=60 tokens.num_samples=600)
    dropout=(model.dropout=0.1 model.attention_dropout=0.1) no_dropout=(model.dropout=0 model.attention_dropout=0) bf16=(model.dtype=bf16)
    ;;
  *) fail "unknown program $program" ;;
esac

run_on() { # run_on RANKS LOG SETTING…
  local launch=() number=$1 log=$2
  shift 2
  [ "$number" -gt 1 ] && launch=(mpirun -n "$number")
  exec "${launch[@]}" "$program" context.device=cpu tokens.path="$data" "${model[@]}" loader.num_workers=1 lr_schedule.type=constant \
    lr_schedule.warmup_steps=0 lr_schedule.lr=0.003 metrics.dir="$work/runs" metrics.progress=plain train.eval_first=false \
    train.eval_every_steps=1000 "$@" > "$log" 2>&1
}
run() { run_on "$ranks" "$@"; }

value_of() { # value_of NAME LOG: what the summary says after training
  sed -n "s/^$1 .*training, \([0-9.]*\).*after.*/\1/p; s/^$1  *\([0-9.]*\)[^0-9.].*/\1/p" "$2" | head -n 1
}
targets_of() { sed -n 's/^eval loss .*over \([0-9]*\) targets$/\1/p' "$1"; }

close_to() { # close_to A B: to 1e-4, for they are printed with four digits
  awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; exit !(d * d <= 1e-8 * a * a) }'
}

refused() { # refused CODE MESSAGE SETTING…
  local expected=$1 message=$2
  shift 2
  (run "$work/refused.log" "${saving[@]}" "$@")
  local code=$?
  [ $code = "$expected" ] || fail "exit code $code with $*, expected $expected"
  grep -qE "$message" "$work/refused.log" || fail "no message '$message' with $*"
  echo "$*: $(grep -oE "[^]]*$message.*" "$work/refused.log" | head -n 1)"
}

case $scenario in
  learns)
    # Without a configuration: the program's own defaults, cut short. Adapters learn in fewer steps.
    steps=60
    [ "$(basename "$program")" = lora_ddp ] && steps=24
    (cd "$(dirname "$data")/.." && exec mpirun -n "$ranks" "$program" context.device=cpu train.max_steps=$steps loader.num_workers=1 \
      ddp.desync_check_every=1 metrics.dir="$work/runs" metrics.progress=plain > "$work/1.log" 2>&1) || fail "exit code $?"
    grep -E "^(eval|token|tokens/s|adapters|base|trainable)" "$work/1.log"
    sed -n 's/^eval loss *\([0-9.]*\) before training, \([0-9.]*\) after.*/\1 \2/p' "$work/1.log" |
      awk '{ found = 1; exit !($2 < 0.9 * $1) } END { if (!found) exit 1 }' || fail "the evaluation loss did not fall"
    grep -q "^tokens/s" "$work/1.log" || fail "no rate of tokens"
    head -n 1 "$work"/runs/*/steps.csv | grep -q ",tokens_per_second," || fail "the CSV names no tokens"
    if [ "$(basename "$program")" = lora_ddp ]; then
      grep -qE "^adapters .*changed from" "$work/1.log" || fail "the adapters did not change"
      grep -qE "^base .*, unchanged$" "$work/1.log" || fail "the base changed"
      # The same adapters on the base in FP8: nearly the same loss, and another base's number nowhere.
      for base in dtype fp8; do
        (run "$work/$base.log" lora.dropout=0 train.max_steps=6 train.batch_size=$((8 / ranks)) model.base_dtype=$base) ||
          fail "exit code $? with model.base_dtype=$base"
      done
      awk -v a="$(value_of "eval loss" "$work/dtype.log")" -v b="$(value_of "eval loss" "$work/fp8.log")" \
        'BEGIN { d = (a - b) / a; exit !(a > 0 && d != 0 && d * d <= 1e-4) }' || fail "another loss with the base in FP8"
      [ "$(grep "^base" "$work/dtype.log")" = "$(grep "^base" "$work/fp8.log")" ] || fail "FP8 changed the base's identity"
    else
      if [ "$(basename "$program")" = bert_ddp ]; then
        grep -q "of them targets" "$work/1.log" && fail "the data report counts next-token targets"
      else
        grep -q "^--- sample 1" "$work/1.log" || fail "no sample of text"
      fi
      # Gradients travel as those of a mean: neither a loss scale of 65536 nor float16 on the wire overflows.
      (run "$work/half.log" amp.dtype=fp16 ddp.comm_hook=fp16_compress train.max_steps=2 train.batch_size=$((12 / ranks)) \
        metrics.log_every=1 metrics.run_name=half) || fail "exit code $? in float16"
      awk -F, 'NR > 1 && $6 !~ /^[0-9.e-]+$/ { bad = 1 } END { exit bad || NR != 3 }' "$work/runs/half/steps.csv" ||
        fail "steps are lost in float16: $(cut -d, -f1,3,6 "$work/runs/half/steps.csv" | tr '\n' ' ')"
    fi
    ;;
  curve)
    # Six rows a step: at once, in two micro-batches, on two ranks that share three rows as 2 and 1, on four
    # ranks that share six as 2, 2, 1 and 1. Sums are taken in another order (fp32): 1e-5 of the loss.
    common=("${no_dropout[@]}" train.max_steps=12 train.eval_every_steps=6 metrics.log_every=1)
    # Recomputed layers, a loss in pieces and a sharded optimizer change nothing either.
    runs=("1 6 1 whole" "1 3 2 whole" "2 3 2 pieces" "4 6 1 whole" "2 3 2 sharded")
    for one in "${runs[@]}"; do
      read -r number batch accum how <<< "$one"
      [ "$number" -le "$ranks" ] || continue
      name=r${number}_${batch}x$accum computation=()
      [ "$how" = sharded ] && name+=_sharded computation=(optimizer.zero1=true)
      [ "$how" = pieces ] && computation=(model.checkpoint_every=1 model.loss_chunk_tokens=50)
      (run_on "$number" "$work/$name.log" "${common[@]}" "${computation[@]}" loader.global_batch_size="$batch" \
        train.grad_accum_steps="$accum" metrics.run_name="$name") || fail "exit code $? on $number ranks"
      [ "$(targets_of "$work/$name.log")" = "$(targets_of "$work/r1_6x1.log")" ] || fail "$name: not every target was counted once"
      for file in steps.csv evals.csv; do
        same_curve r1_6x1 "$name" $file "NR < 3"
      done
    done
    ;;
  resumes)
    # On one rank with bf16 parameters, whose float32 masters are what is saved; on more with state in parts.
    kinds=(optimizer.zero1=true)
    [ "$ranks" = 1 ] && kinds=("${bf16[@]}")
    common=("${dropout[@]}" "${kinds[@]}" train.max_steps=14 train.batch_size=$((8 / ranks)) train.eval_every_steps=8)
    check_cut_run "eval loss" "${common[@]}"
    (run "$work/other.log" "${common[@]}" context.seed=1) || fail "exit code $? with another context.seed"
    [ "$(hash_of "$work/other.log")" != "$(hash_of "$work/whole.log")" ] || fail "context.seed has no effect"
    if [ "$(basename "$program")" = lora_ddp ]; then
      size=$(find "$work/checkpoints" -name model.safetensors -printf '%s\n' | head -n 1)
      full=$(sed -n 's/^trainable *\([0-9.]*\) M of \([0-9.]*\) M.*/\1 \2/p' "$work/whole.log" | head -n 1 | awk '{ print int(4e6 * ($1 + $2) / 2) }')
      [ "$size" -lt "$full" ] || fail "the checkpoint's model has $size bytes: it holds the base"
      for name in best last; do
        [ -s "$work/checkpoints/adapters/$name/adapter_model.safetensors" ] || fail "no adapter '$name' in PEFT's layout"
      done
    fi
    ;;
  stops)
    saving=("${no_dropout[@]}" train.max_steps=2000 train.batch_size=$((8 / ranks)) checkpoint.stop_check_seconds=0.05 decode.num_prompts=0)
    with_checkpoints=(checkpoint.dir="$work/checkpoints" checkpoint.every_steps=4)
    (run "$work/cut.log" "${saving[@]}" "${with_checkpoints[@]}") &
    pid=$!
    wait_for_checkpoint $pid
    stop_run $pid 75
    steps=$(sed -n 's/.*asked to stop: stopped after \([0-9]*\) steps.*/\1/p' "$work/cut.log" | head -n 1)
    grep -q "stopped after $steps steps: saved last in $work/checkpoints/adapters" "$work/cut.log" || fail "the adapters at the stop are not reported"
    for source in "checkpoint.dir=$work/checkpoints" "checkpoint.dir= lora.adapter=$work/checkpoints/adapters/last"; do
      # shellcheck disable=SC2086
      (run_on 1 "$work/eval.log" "${saving[@]}" run.mode=evaluate $source) || fail "exit code $? of the evaluation"
      echo "stopped after $steps steps, $(grep '^eval loss' "$work/eval.log") of $source"
      grep '^eval loss' "$work/eval.log" >> "$work/evals.txt"
    done
    [ "$(sort -u "$work/evals.txt" | wc -l)" = 1 ] || fail "the adapters are not the checkpoint's"
    # The same job again: what it finds is its own.
    (run "$work/again.log" "${saving[@]}" "${with_checkpoints[@]}" train.max_steps=$((steps + 2))) || fail "exit code $? of the resumed run"
    grep -q "^resumed  *at step $steps" "$work/again.log" || fail "it did not resume"

    (run "$work/alone.log" "${saving[@]}" checkpoint.dir= lora.save_dir="$work/alone" metrics.log_every=1) &
    pid=$!
    wait_for $pid grep -q "step 3/" "$work/alone.log"
    stop_run $pid 1
    [ -s "$work/alone/last/adapter_model.safetensors" ] || fail "nothing was saved at a stop without checkpoints"
    ;;
  keeps)
    saving=("${dropout[@]}" train.max_steps=2 train.eval_every_steps=1 train.batch_size=$((8 / ranks)) decode.num_prompts=0)
    (run "$work/first.log" "${saving[@]}" checkpoint.dir="$work/first") || fail "exit code $?"
    contents() { find "$work/first/adapters" -type f -exec sha256sum {} + | sort; }
    before=$(contents)
    [ "$(wc -l <<< "$before")" = 4 ] || fail "not two adapters: $before"
    refused 64 "first cause: lora.save_dir: .*first/adapters/best holds the weights of another run; this run starts at step 0.*\(rank 0 at step 0" \
      checkpoint.dir="$work/second" lora.save_dir="$work/first/adapters"
    refused 64 "first/adapters/best holds the weights of another run" checkpoint.dir= lora.save_dir="$work/first/adapters"
    (run "$work/second.log" "${saving[@]}" checkpoint.dir="$work/second") || fail "exit code $? in a folder of its own"
    refused 64 "the weights of another run; this run resumes from a checkpoint whose run wrote to checkpoint.dir" train.max_steps=3 \
      checkpoint.dir="$work/second" lora.save_dir="$work/first/adapters"
    [ "$(contents)" = "$before" ] || fail "a refused run changed the adapters"
    (run "$work/on.log" "${saving[@]}" train.max_steps=3 checkpoint.dir="$work/first") || fail "exit code $? of the resumed run"
    [ "$(contents)" != "$before" ] || fail "a resumed run left its adapters as they were"
    before=$(contents)
    rm -r "$work"/first/step_*
    refused 64 "first cause: checkpoint.dir: .*first/adapters/best holds.*\(rank 0 at step 0" checkpoint.dir="$work/first"
    [ "$(contents)" = "$before" ] || fail "a refused run changed the adapters"

    # Killed behind its first best, before a checkpoint was due: the same job may start again.
    saving+=(checkpoint.dir="$work/killed" checkpoint.every_minutes=0)
    (run "$work/killed.log" "${saving[@]}" train.max_steps=2000) &
    pid=$!
    wait_for $pid test -s "$work/killed/adapters/best/adapter_model.safetensors"
    # shellcheck disable=SC2046
    kill -9 $(descendants $pid) $pid
    wait $pid 2> /dev/null
    (run "$work/again.log" "${saving[@]}" train.max_steps=5) || fail "exit code $? when started again"
    grep -q "^resumed  *at step 1 of" "$work/again.log" || fail "it did not go on from the checkpoint beside the first best"
    ;;
  evaluates)
    saving=("${dropout[@]}" train.max_steps=6 train.batch_size=$((8 / ranks)) checkpoint.dir="$work/checkpoints" decode.num_prompts=3
      decode.max_new_tokens=8 decode.show=1)
    (run "$work/train.log" "${saving[@]}") || fail "exit code $?"
    for number in 1 "$ranks" adapter; do
      source=(run.mode=evaluate)
      [ "$number" = adapter ] && number=1 source+=(lora.adapter="$work/checkpoints/adapters/last" checkpoint.dir=)
      mkdir -p "$work/checkpoints/.saving_step_0000000099"  # as of a run that is still training
      (run_on "$number" "$work/eval.log" "${saving[@]}" "${source[@]}") || fail "exit code $? of the evaluation"
      trained=$(value_of "eval loss" "$work/train.log") evaluated=$(value_of "eval loss" "$work/eval.log")
      echo "trained $trained, evaluated on $number ranks $evaluated; $(grep '^decoded' "$work/eval.log")"
      { [ -n "$trained" ] && close_to "$trained" "$evaluated"; } || fail "the losses differ"
      [ "$(targets_of "$work/train.log")" = "$(targets_of "$work/eval.log")" ] || fail "not every target was counted once"
      [ "$(sed -n 's/^decoded[^:]*: //p' "$work/train.log")" = "$(sed -n 's/^decoded[^:]*: //p' "$work/eval.log")" ] || fail "other answers"
      grep -qE "^decoded: [0-9]+ of 3 .* API calls equal the reference" "$work/eval.log" || fail "no share of equal calls"
      grep -q "^  reference " "$work/eval.log" || fail "no answer is shown"
      ! grep -q "without a training step" "$work/eval.log" || fail "an evaluation is blamed for not training"
      grep -qE "^evaluated  .*(after step 6|adapters/last)$" "$work/eval.log" || fail "it does not say what was evaluated"
      [ -d "$work/checkpoints/.saving_step_0000000099" ] || fail "an evaluation removed a save under way"
    done
    ;;
  whole)
    saving=()
    model=("${model[@]:2}" lora.rank=0)  # without the adapters' rank and alpha
    training=(train.max_steps=8 train.eval_every_steps=4 train.batch_size=$((8 / ranks)) decode.num_prompts=0 checkpoint.dir=
      lora.save_dir="$work/models")
    (run "$work/train.log" "${training[@]}" train.eval_first=true) || fail "exit code $?"
    grep -qE "^model .*changed from" "$work/train.log" || fail "the model did not change"
    grep -qE "^trainable  *all " "$work/train.log" || fail "not all parameters were trained"
    for which in best last; do
      [ -f "$work/models/$which/config.json" ] || fail "no $which model was saved"
      cmp "$data/tokenizer.json" "$work/models/$which/tokenizer.json" || fail "the $which model has not the data's tokenizer"
    done
    (run_on 1 "$work/eval.log" run.mode=evaluate checkpoint.dir= decode.num_prompts=0 model.init=pretrained \
      model.path="$work/models/last") || fail "exit code $? of the evaluation"
    trained=$(value_of "eval loss" "$work/train.log") evaluated=$(value_of "eval loss" "$work/eval.log")
    echo "trained $trained, evaluated from its folder $evaluated"
    { [ -n "$trained" ] && close_to "$trained" "$evaluated"; } || fail "the losses differ"
    grep -q "tokenizer" "$work/eval.log" && fail "a warning without a reason"
    refused 64 "has no effect with lora.rank=0" lora.adapter="$work/models/last"
    refused 64 "models/best holds the weights of another run" "${training[@]}"
    # Nothing is lost: neither what somebody put there nor the base, which gives the model what stands beside its weights.
    mkdir -p "$work/theirs/last"
    echo precious > "$work/theirs/last/notes.txt"
    refused 64 "failed at step 0: lora.save_dir: .*theirs/last holds notes.txt, which no run writes there" "${training[@]}" lora.save_dir="$work/theirs"
    [ "$(cat "$work/theirs/last/notes.txt")" = precious ] || fail "a refused run removed a file"
    on_base=(model.init=pretrained model.path="$work/models/last" train.max_steps=2 train.eval_every_steps=1)
    weights=$(sha256sum "$work/models/last/model.safetensors")
    refused 64 "failed at step 0: lora.save_dir: .*models/last is the base of this run" "${training[@]}" "${on_base[@]}"
    [ "$(sha256sum "$work/models/last/model.safetensors")" = "$weights" ] || fail "a refused run changed its base"
    rm "$work/models/last/tokenizer_config.json"
    (run "$work/tuned.log" "${training[@]}" "${on_base[@]}" lora.save_dir="$work/tuned") || fail "exit code $? on a saved base"
    [ "$(ls -A "$work/tuned" | xargs)" = "best last" ] || fail "left beside the models: $(ls -A "$work/tuned")"
    for which in best last; do
      diff <(cd "$work/models/last" && ls) <(cd "$work/tuned/$which" && ls) || fail "the $which model has not the files of its base"
      cmp "$work/models/last/config.json" "$work/tuned/$which/config.json" || fail "the $which model has another configuration than its base"
    done
    # Without a tokenizer beside the model, and with another one of as many ids. Every rank reads the folder alone.
    ranks=1
    base=(run.mode=evaluate checkpoint.dir= decode.num_prompts=0 model.init=pretrained model.path="$work/models/last")
    rm "$work/models/last/tokenizer.json"
    (run_on 1 "$work/eval.log" "${base[@]}") || fail "exit code $? without a tokenizer"
    grep -q "has no tokenizer.json that can be compared" "$work/eval.log" || fail "no warning about an unknown tokenizer"
    sed 's/"A":35,"B":36,/"B":35,"A":36,/' "$data/tokenizer.json" > "$work/models/last/tokenizer.json"
    refused 65 "not prepared with the tokenizer of model.path: .* 2 ids, the first 35, which is 'A' in .* and 'B' in .*--tokenizer" "${base[@]}"
    # Sizes that no machine holds: refused by key, and as a whole.
    for change in 's/"hidden_size": *[0-9]*/"hidden_size": 1000000000000/' 's/"num_hidden_layers": *[0-9]*/"num_hidden_layers": 1000000000/'; do
      mkdir -p "$work/huge"
      sed "$change" "$work/models/last/config.json" > "$work/huge/config.json"
      refused 74 "huge/config.json: key .* is 1000000.*, expected 1 to" "${base[@]}" model.path="$work/huge"
    done
    sed 's/"intermediate_size": *[0-9]*/"intermediate_size": 1000000/; s/"hidden_size": *[0-9]*/"hidden_size": 131072/' \
      "$work/models/last/config.json" > "$work/huge/config.json"
    refused 64 "model.path=.*huge: a (qwen2|llama) model of .* GB of parameters .* cannot be created: this machine has" "${base[@]}" model.path="$work/huge"
    ;;
  refuses)
    saving=(train.max_steps=2)
    refused 64 "unknown setting 'data.path'; did you mean tokens.path" data.path=/nonexistent
    if [ "$(basename "$program")" = bert_ddp ]; then
      refused 64 "tokens.max_seq_len=128 is longer than the model's 64 positions" tokens.max_seq_len=128
      refused 65 "vocabulary.safetensors has no special token .MASK..*fix: prepare the data" tokens.path="${data%/*}/chat-sample"
      refused 65 "vocabulary of 2048 .*the model has 100" model.vocab_size=100
      refused 64 "masking.masked_share" masking.masked_share=1.5
      refused 64 "model.init=pretrained needs model.path" model.init=pretrained
      mkdir -p "$work/gpt2"
      cp "$(dirname "$0")/../golden/lm/gpt2/config.json" "$work/gpt2"
      refused 64 "config.json: key .model_type. is .gpt2., but bert is needed here" model.init=pretrained model.path="$work/gpt2"
      exit 0
    fi
    refused 64 "unknown setting 'train.label_smoothing'" train.label_smoothing=0.3
    saving=(train.max_steps=2 train.batch_size=$((8 / ranks)) checkpoint.dir="$work/checkpoints")
    (run "$work/1.log" "${saving[@]}") || fail "exit code $?"
    refused 70 "trained over another base: frozen parameters [0-9a-f]{16}, here [0-9a-f]{16}" model.seed=1
    refused 70 "does not fit: .*lora_A.* is saved with shape .16, 128. but has shape .8, 128. here" lora.rank=8
    refused 70 "does not fit: .*(no|has) .*lora_A" lora.target_modules=q_proj
    refused 70 "trained with adapters of rank 16 and alpha 32 .*this run has adapters of rank 16 and alpha 8" lora.alpha=8
    config=$work/checkpoints/adapters/best/adapter_config.json
    cp "$config" "$work/saved_config"
    sed -i 's/"lora_alpha": *32/"lora_alpha": 8/' "$config"
    refused 64 "first cause: .*adapters/best.* describes another adapter.*\(rank 0 at step 2" train.max_steps=3
    cp "$work/saved_config" "$config"
    refused 73 "first cause: lora.save_dir: cannot write.*\(rank 0 at step 0" checkpoint.dir= lora.save_dir=/proc/none/adapters
    refused 74 "there is no checkpoint in checkpoint.dir" run.mode=evaluate checkpoint.dir="$work/mistyped"
    [ ! -e "$work/mistyped" ] || fail "an evaluation made a folder"
    refused 70 "adapters/last.*rank" checkpoint.dir= lora.adapter="$work/checkpoints/adapters/last" lora.rank=8
    refused 70 "last was trained over another base: Float [0-9a-f]{16}.*here Float [0-9a-f]{16}; fix" checkpoint.dir= lora.adapter="$work/checkpoints/adapters/last" model.seed=1
    refused 74 "no_such_folder" checkpoint.dir= lora.adapter="$work/no_such_folder"
    saving=(train.max_steps=2)
    refused 64 "model.init=pretrained needs model.path" model.init=pretrained
    refused 74 "config.json" model.init=pretrained model.path="$work"
    refused 65 "vocabulary of 1536 .*the model has 100" model.vocab_size=100
    refused 65 "gives a target within max_seq_len=4 .*fix: a larger tokens.max_seq_len" tokens.max_seq_len=4 # no answer begins that early
    refused 64 "lora.*nothing_such" lora.target_modules=nothing_such
    refused 64 "tokens.max_seq_len=4096 is longer than the model's 2048 positions" tokens.max_seq_len=4096
    refused 64 "lora.rank" lora.rank=-1
    refused 64 "model.base_dtype=fp8 is for frozen weights, but lora.rank=0" model.base_dtype=fp8 lora.rank=0
    refused 70 "trained with adapters of rank 16 and alpha 32 .*, on a base in FP8" checkpoint.dir="$work/checkpoints" model.base_dtype=fp8 \
      train.batch_size=$((8 / ranks))
    refused 64 "model.size" model.size=huge
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
