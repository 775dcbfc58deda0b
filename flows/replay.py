"""Replays stretches of a reference run from its own checkpoints, and proves that they are the same run.

    python flows/replay.py run --reference laptop --windows 380:20

A window N:K starts from the reference's native state of update N (weights, moments, Adam step) and takes K
updates here on the same batches and learning rates. Every one is compared with the reference's log, and the
end with its state of N + K.
"""

from metaflow import FlowSpec, Parameter, card, current, step

from olmo_core_jax.launch import flow_entry
from olmo_core_jax.stages import replay_folder


class Replay(FlowSpec):
    """Check any stretch of a run for a millionth of its cost.

    start        fixes the reference, the windows and the run root
    build_index  the mixes into an index and the exact data order
    window       one window, one task each
    join         a card with one row a window
    end          fails where a window is not the same run
    """

    reference = Parameter(
        "reference", default="laptop", help="recipe that names the reference, or a YAML file"
    )
    windows = Parameter(
        "windows",
        default="",
        help="[STAGE/]N:K,...; default: all between native checkpoints that the recipe names",
    )
    checkpoints = Parameter(
        "checkpoints",
        default="",
        help="where step{N} folders are, if not where the recipe says; {stage} stands for the stage",
    )
    partial = Parameter(
        "partial",
        default=False,
        help="compare only what the reference logged, and no state at a window's end",
    )
    output = Parameter(
        "output", default="", help="run root (default: runs/replay-<recipe>-<run id>)"
    )

    @step
    def start(self):
        """Fix what is replayed and where its results go."""
        plan = flow_entry.plan(self.reference, self.output, f"replay-{current.run_id}")
        self.recipe_file, self.run_root = plan.recipe, plan.run_root
        self.chosen = flow_entry.replay_windows(self.reference, self.windows)
        print(f"{plan.name}: {', '.join(self.chosen)}; run root {self.run_root}")
        self.next(self.build_index)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def build_index(self):
        """Every shard is measured once; the order is fixed."""
        self.indexed = self._run("build_index")
        self.next(self.window, foreach="chosen")

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def window(self):
        """One window: the trainer's own step on the reference's own state."""
        self.replays = self.input
        flags = [f"--checkpoints={self.checkpoints}"] if self.checkpoints else []
        flags += ["--partial"] if self.partial else []
        self.replayed = self._run(replay_folder(self.input), *flags)
        self.next(self.join)

    @card(type="blank", id="windows")
    @step
    def join(self, inputs):
        """All windows side by side."""
        from olmo_core_jax.experiments.replay import card

        self.merge_artifacts(inputs, include=["recipe_file", "run_root", "chosen"])
        self.figures = {task.replays: task.replayed["figures"] for task in inputs}
        card.draw(current.card["windows"], self.figures)
        self.next(self.end)

    @step
    def end(self):
        """The verdict; a window that is not the same run fails the flow."""
        from olmo_core_jax.experiments.replay import card

        print(card.window_table(self.figures).markdown())
        flow_entry.require_all_passed(self.figures)

    def _run(self, folder: str, *flags: str) -> dict:
        """Run one stage's job with its live card."""
        card = current.card["stage"]
        return flow_entry.run_stage(folder, self.recipe_file, self.run_root, card, *flags)


if __name__ == "__main__":
    flow_entry.prepare("Replay")
    Replay()
