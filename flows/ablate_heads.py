"""Trains a recipe and its baseline, which differ only in how attention is split into heads, and compares them.

    python flows/ablate_heads.py run
    python flows/ablate_heads.py run --recipe olmo3_7b_16x256 --updates 1000

The recipe `extends` its baseline and halves or doubles the heads; parameters and FLOPs have to stay the same. Both arms
start from the same numbers (our own initialisation, one seed) and see the same batches. They run one after the other, so
that neither slows the other down; on a cluster, `--max-workers 2` runs both at once.
"""

from metaflow import FlowSpec, Parameter, card, current, step

from olmo_core_jax.experiments.heads import launch
from olmo_core_jax.launch import flow_entry


class AblateHeads(FlowSpec):
    """Does it matter how many heads share the width?

    start        fixes both arms; refuses two that differ in parameters, FLOPs or anything but their heads
    train        one arm, one task each: first weights, training, held-out loss
    compare      a card with both curves, their difference, and the speed of each
    end          prints the figures; fails where the comparison was not fair
    """

    recipe = Parameter(
        "recipe", default="laptop_2x24", help="a recipe that extends its baseline: name or file"
    )
    updates = Parameter(
        "updates", default=0, help="how many of stage 1's updates both arms make (0: all)"
    )
    output = Parameter(
        "output", default="", help="folder or URI (default: runs/<recipe>-ablate-<run id>)"
    )

    @step
    def start(self):
        """Two recipes, cut to what is compared, and the price that both pay."""
        plan = launch.two_arms(self.recipe, self.output, current.run_id, self.updates)
        self.run_root, self.arms = plan.run_root, plan.arms
        self.last_step, self.costs = plan.updates, plan.costs
        print(
            f"{' against '.join(self.arms)}: {plan.updates} updates, run roots under {plan.run_root}"
        )
        self.next(self.train, foreach="arms")

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def train(self):
        """One arm, live on its card."""
        recipe, root = f"{self.run_root}/{self.input}.yaml", f"{self.run_root}/{self.input}"
        launch.prepare(recipe, root)
        card = current.card["stage"]
        self.trained = flow_entry.run_stage("stage1_train", recipe, root, card)
        launch.held_out(recipe, root)
        self.next(self.compare)

    @card(type="blank", id="ablation")
    @step
    def compare(self, inputs):
        """Both arms side by side."""
        from olmo_core_jax.experiments.heads import card
        from olmo_core_jax.experiments.heads.comparison import compare_arms

        self.merge_artifacts(inputs, exclude=["trained"])
        found = compare_arms({arm: f"{self.run_root}/{arm}" for arm in self.arms}, self.last_step)
        card.draw(current.card["ablation"], found, self.costs)
        self.figures, self.fair = found.figures(), found.fair
        self.summary = card.summary(found)
        self.table = card.figure_table(found, self.costs).markdown()
        self.next(self.end)

    @step
    def end(self):
        """The figures."""
        print(self.table)
        print(self.summary)
        flow_entry.require(self.fair, self.summary)


if __name__ == "__main__":
    launch.one_at_a_time()
    flow_entry.prepare("AblateHeads")
    AblateHeads()
