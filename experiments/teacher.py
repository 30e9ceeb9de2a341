"""A larger teacher beside rejection sampling and GRPO, for the same seconds (docs/rl.md).

    python train.py config/quickstart.py --n_layer=6 --n_embd=256 --max_steps=600 --seed=100 \\
        --out_dir=out/teacher
    python compare.py experiments/teacher.py
"""
start_command = "train.py config/quickstart.py"
out_dir = "out/with_teacher"
command = ("datagen.py --max_new_tokens=144 --temperature=1 --oversample=8 --keep_per_question=1 "
           "--stop_early --num_questions=1500 && train.py config/rft.py --num_epochs=1.5 && "
           "grpo.py config/grpo.py --eval_interval=0")
arms = {
    "the teacher's samples": (
        "datagen.py --init_from=out/teacher --max_new_tokens=144 --temperature=1 --oversample=8 "
        "--keep_per_question=1 --stop_early && train.py config/rft.py --num_epochs=1.5"),
    "distilled": (
        "grpo.py config/grpo.py --temperature=1 --eval_interval=0 --teacher=out/teacher --beta=1 "
        "--reward_weight=0"),
    "distilled with the reward": (
        "grpo.py config/grpo.py --temperature=1 --eval_interval=0 --teacher=out/teacher --beta=1"),
}
budget = "seconds"
seeds = 5
