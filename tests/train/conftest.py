import pytest


@pytest.fixture(scope="session", autouse=True)
def one_compile():
    """Trainers of the same recipe in this process share a jitted step: a resume compiles nothing."""
    from olmo_core_jax.train import step

    make, made = step.make_train_step, {}

    def shared(*args, **kwargs):
        key = repr((args, kwargs))
        if key not in made:
            made[key] = make(*args, **kwargs)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "make_train_step", shared)
        yield
