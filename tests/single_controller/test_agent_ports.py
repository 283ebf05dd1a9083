"""Ray's nodes start with agents whose ports are known, so that none waits for a slow agent."""

from ray import _raylet
from ray._private import services

from verl.single_controller.ray.agent_ports import fixed_agent_ports


def test_the_ports_of_each_node_are_chosen_before_it_starts_unless_they_are_given(tmp_path, monkeypatch):
    nodes = []
    persisted = []

    def start_raylet(
        node_id,
        session_dir,
        metrics_agent_port=None,
        runtime_env_agent_port=None,
        metrics_export_port=None,
        dashboard_agent_listen_port=0,
    ):
        ports = (metrics_agent_port, runtime_env_agent_port, metrics_export_port, dashboard_agent_listen_port)
        nodes.append((node_id, *ports))

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(_raylet, "persist_port", lambda *arguments: persisted.append(arguments))
    with fixed_agent_ports():
        services.start_raylet("n0", str(tmp_path), dashboard_agent_listen_port=0)
        services.start_raylet("n1", str(tmp_path), metrics_agent_port=7001)
    ports = [port for _, *ports in nodes for port in ports]
    assert len(set(ports)) == 8 and all(port > 1023 for port in ports)
    assert [node_id for node_id, *_ in nodes] == ["n0", "n1"] and nodes[1][1] == 7001
    name = _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME
    assert persisted == [(str(tmp_path), node_id, name, port) for node_id, *_, port in nodes]
    assert services.start_raylet is start_raylet
