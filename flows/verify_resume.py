"""Proves on any launch profile that a resume is exact: one run unbroken, one interrupted, compared bit by bit.

    python flows/verify_resume.py run --recipe laptop --updates 30 --interrupt 7:term,13:kill,20:save

The profile that OLMO_LAUNCH names says where both run. Interruptions are real signals:
see olmo_core_jax/experiments/resume/plan.py.
"""

from metaflow import FlowSpec, Parameter, card, current, step

from olmo_core_jax.experiments.resume import launch
from olmo_core_jax.launch import flow_entry


class VerifyResume(FlowSpec):
    """An A/B of the same first updates, with and without interruptions.

    start        shortens the recipe and fixes the run roots
    train        one run, one task each: unbroken, interrupted
    compare      a card with the differences
    end          fails where there is one, or where an interruption never happened
    """

    recipe = Parameter("recipe", default="laptop", help="name of a shipped recipe, or a YAML file")
    updates = Parameter("updates", default=30, help="how many of stage 1's updates both runs make")
    every = Parameter("every", default=5, help="updates between checkpoints")
    interrupt = Parameter(
        "interrupt",
        default="7:term,13:kill,20:save",
        help="UPDATE:term|kill|save, one an attempt; the profile's max_restarts allows for kills",
    )
    output = Parameter("output", default="", help="folder or URI (default: runs/verify-<run id>)")

    @step
    def start(self):
        """The same short recipe for both; everything else is the recipe's own."""
        plan = launch.short_plan(
            self.recipe, self.output, current.run_id, self.updates, self.every, self.interrupt
        )
        self.recipe_file, self.run_root = plan.recipe, plan.run_root
        self.kinds = ["unbroken", "interrupted"]
        print(f"{plan.name}: {self.updates} updates, run roots under {self.run_root}")
        self.next(self.train, foreach="kinds")

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def train(self):
        """Weights, index and training; only the second run is interrupted."""
        root = f"{self.run_root}/{self.input}"
        flags = [f"--interrupt={self.interrupt}"] if self.input == "interrupted" else []
        launch.prepare(self.recipe_file, root)
        card = current.card["stage"]
        self.trained = flow_entry.run_stage("stage1_train", self.recipe_file, root, card, *flags)
        self.next(self.compare)

    @card(type="blank", id="resume")
    @step
    def compare(self, inputs):
        """Every update and the last state of both, side by side."""
        from olmo_core_jax.experiments.resume import card
        from olmo_core_jax.experiments.resume.comparison import compare_runs

        self.merge_artifacts(inputs, include=["recipe_file", "run_root"])
        roots = [f"{self.run_root}/{kind}" for kind in ("unbroken", "interrupted")]
        found = compare_runs(*roots, "stage1", self.updates)
        card.draw(current.card["resume"], found)
        self.verdict = card.summary(found)
        self.table = card.check_table(found).markdown()
        self.same, self.attempts = found.same, found.attempts
        self.next(self.end)

    @step
    def end(self):
        """The verdict; a difference fails the flow, and so does an interruption that never happened."""
        print(self.table)
        print(self.verdict)
        flow_entry.require(self.same, self.verdict)
        launch.require_all_interrupted(self.interrupt, self.attempts)


if __name__ == "__main__":
    flow_entry.prepare("VerifyResume")
    VerifyResume()
