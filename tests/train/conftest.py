import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """Every process of these tests compiles a program once; the executable is the same one then."""
    import jax

    folder = str(tmp_path_factory.mktemp("jax_cache"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        del os.environ[name.upper()]
        jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def one_compile(compile_cache):
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
