// Package manifests decodes what the chart renders with the types of Kubernetes' API: a field that a
// type does not have, or that is given twice, is an error, as with kubectl's validation. `make
// chart` runs it.
package manifests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
)

// types are those of all manifests, by apiVersion and kind. Those of Prometheus' operator have only
// metadata here.
var types = map[string]func() any{
	"v1 ConfigMap":                                    func() any { return new(corev1.ConfigMap) },
	"v1 ServiceAccount":                               func() any { return new(corev1.ServiceAccount) },
	"apps/v1 DaemonSet":                               func() any { return new(appsv1.DaemonSet) },
	"batch/v1 Job":                                    func() any { return new(batchv1.Job) },
	"batch/v1 CronJob":                                func() any { return new(batchv1.CronJob) },
	"node.k8s.io/v1 RuntimeClass":                     func() any { return new(nodev1.RuntimeClass) },
	"rbac.authorization.k8s.io/v1 ClusterRole":        func() any { return new(rbacv1.ClusterRole) },
	"rbac.authorization.k8s.io/v1 ClusterRoleBinding": func() any { return new(rbacv1.ClusterRoleBinding) },
	"rbac.authorization.k8s.io/v1 Role":               func() any { return new(rbacv1.Role) },
	"rbac.authorization.k8s.io/v1 RoleBinding":        func() any { return new(rbacv1.RoleBinding) },
	"monitoring.coreos.com/v1 PodMonitor":             func() any { return new(other) },
	"monitoring.coreos.com/v1 PrometheusRule":         func() any { return new(other) },
}

type other struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              map[string]any `json:"spec"`
}

// decode decodes every document of a manifest.
func decode(manifest []byte) ([]any, error) {
	var objects []any
	for _, document := range bytes.Split(append([]byte("\n"), manifest...), []byte("\n---\n")) {
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(document, &meta); err != nil {
			return objects, err
		}
		if meta == (metav1.TypeMeta{}) {
			continue // comments alone
		}
		kind := meta.APIVersion + " " + meta.Kind
		object, known := types[kind]
		if !known {
			return objects, fmt.Errorf("%q is not a type of these manifests", kind)
		}
		decoded := object()
		if err := yaml.UnmarshalStrict(document, decoded); err != nil {
			return objects, fmt.Errorf("%s: %w", kind, err)
		}
		objects = append(objects, decoded)
	}
	return objects, nil
}

// read decodes the manifests that a variable names, separated as in PATH.
func read(t *testing.T, variable string) map[string][]any {
	found := map[string][]any{}
	for _, path := range filepath.SplitList(os.Getenv(variable)) {
		manifest, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		objects, err := decode(manifest)
		if err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if len(objects) == 0 {
			t.Errorf("%s: no object", path)
		}
		found[path] = objects
	}
	if len(found) == 0 {
		t.Fatalf("%s names no manifest: run `make chart`", variable)
	}
	return found
}

func is(value *bool, wanted bool) bool { return value != nil && *value == wanted }

// pods returns the pods that objects make, by the kind of the object.
func pods(t *testing.T, objects []any) map[string]corev1.PodTemplateSpec {
	found := map[string]corev1.PodTemplateSpec{}
	for _, object := range objects {
		switch object := object.(type) {
		case *batchv1.Job:
			found["Job "+object.Name] = object.Spec.Template
		case *batchv1.CronJob:
			found["CronJob"] = object.Spec.JobTemplate.Spec.Template
		case *appsv1.DaemonSet:
			found["DaemonSet"] = object.Spec.Template
		case *corev1.ConfigMap:
			text, has := object.Data["job"]
			if !has {
				continue
			}
			decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
			decoder.DisallowUnknownFields()
			job := new(batchv1.Job)
			if err := decoder.Decode(job); err != nil {
				t.Errorf("the Job of the ConfigMap: %v", err)
			}
			found["installer"] = job.Spec.Template
			if job.Spec.TTLSecondsAfterFinished == nil || job.Spec.ActiveDeadlineSeconds == nil {
				t.Error("the Job of a node has no end")
			}
		}
	}
	return found
}

func TestManifestsDecodeStrictly(t *testing.T) {
	for path, objects := range read(t, "MANIFESTS") {
		for _, object := range objects {
			name := object.(metav1.Object).GetName()
			for _, fault := range validation.IsDNS1123Subdomain(name) {
				t.Errorf("%s: %s: %s", path, name, fault)
			}
			if _, isJob := object.(*batchv1.Job); isJob && len(name) > 63 {
				t.Errorf("%s: the name of the Job %s is too long", path, name)
			}
		}
		pods(t, objects)
	}
}

// One pod is privileged, which ends, and it has no account.
func TestNoPodHasBothPrivilegesAndAnAccount(t *testing.T) {
	seen := 0
	for path, objects := range read(t, "MANIFESTS") {
		for kind, pod := range pods(t, objects) {
			container := pod.Spec.Containers[0]
			context := container.SecurityContext
			if container.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
				t.Errorf("%s: %s does not report the reason of a failure", path, kind)
			}
			if pod.Labels["app.kubernetes.io/instance"] == "" || pod.Labels["app.kubernetes.io/version"] == "" {
				t.Errorf("%s: %s lacks labels", path, kind)
			}
			if kind == "installer" {
				seen++
				if !is(context.Privileged, true) || !is(pod.Spec.AutomountServiceAccountToken, false) || pod.Spec.RestartPolicy != corev1.RestartPolicyNever {
					t.Errorf("%s: %s: %+v", path, kind, pod.Spec)
				}
				// Twice the timeout of `enable`, which restores its files after a failure.
				if period := pod.Spec.TerminationGracePeriodSeconds; period == nil || *period <= 120 {
					t.Errorf("%s: a pod that is killed leaves its node half changed", path)
				}
				continue
			}
			for _, volume := range pod.Spec.Volumes {
				if volume.HostPath != nil {
					t.Errorf("%s: %s mounts the node's files", path, kind)
				}
			}
			if pod.Spec.HostPID || context.Privileged != nil || !is(context.AllowPrivilegeEscalation, false) || !is(context.ReadOnlyRootFilesystem, true) || !is(pod.Spec.SecurityContext.RunAsNonRoot, true) {
				t.Errorf("%s: %s has privileges", path, kind)
			}
		}
	}
	if seen < 5 {
		t.Errorf("%d installers", seen)
	}
}

// The coordinator's account may do what rollout.sh asks of the API server, and nothing else.
func TestTheAccountMayDoWhatTheScriptDoes(t *testing.T) {
	wanted := map[string]string{
		"ClusterRole": `[{[list patch] [] [nodes] [] []} {[list] [] [pods] [] []}]`,
		"Role":        `[{[list create delete] [batch] [jobs] [] []} {[get patch] [] [configmaps] [pause-sandboxer] []}]`,
	}
	for path, objects := range read(t, "MANIFESTS") {
		if filepath.Base(path) != "default.yaml" {
			continue
		}
		seen := 0
		for _, object := range objects {
			var kind, rules string
			switch object := object.(type) {
			case *rbacv1.ClusterRole:
				kind, rules = "ClusterRole", fmt.Sprint(object.Rules)
			case *rbacv1.Role:
				kind, rules = "Role", fmt.Sprint(object.Rules)
			default:
				continue
			}
			seen++
			if rules != wanted[kind] {
				t.Errorf("%s: %s", kind, rules)
			}
		}
		if seen != len(wanted) {
			t.Errorf("%d roles", seen)
		}
	}
}

// Two releases have no object in common, and their RuntimeClasses choose nodes of their own.
func TestTwoPoolsLiveInOneCluster(t *testing.T) {
	names, handlers := map[string]string{}, map[string]bool{}
	for path, objects := range read(t, "POOLS") {
		for _, object := range objects {
			name := fmt.Sprintf("%T %s", object, object.(metav1.Object).GetName())
			if earlier, twice := names[name]; twice {
				t.Errorf("%s is in %s and %s", name, earlier, path)
			}
			names[name] = path
			if class, is := object.(*nodev1.RuntimeClass); is {
				handlers[fmt.Sprint(class.Handler, class.Scheduling.NodeSelector)] = true
			}
		}
	}
	if len(handlers) != 2 {
		t.Errorf("%v", handlers)
	}
}

func TestAFieldThatTheTypeLacksIsRefused(t *testing.T) {
	class := "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nhandler: x\n"
	for text, valid := range map[string]bool{
		class:                                   true,
		class + "handlers: x\n":                 false,
		class + "handler: y\n":                  false,
		class + "scheduling:\n  selector: {}\n": false,
		"apiVersion: v1\nkind: Pods\n":          false,
	} {
		if _, err := decode([]byte(text)); (err == nil) != valid {
			t.Errorf("%q: %v", text, err)
		}
	}
}
