// Package manifests decodes the manifests of packaging/kubernetes with the types of Kubernetes' API:
// a field that a type does not have, or that is given twice, is an error, as with kubectl's
// validation. `make chart` also runs it on what the chart renders with other values.
package manifests

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// types are those of all manifests, by apiVersion and kind.
var types = map[string]func() any{
	"v1 ServiceAccount":                               func() any { return new(corev1.ServiceAccount) },
	"apps/v1 DaemonSet":                               func() any { return new(appsv1.DaemonSet) },
	"node.k8s.io/v1 RuntimeClass":                     func() any { return new(nodev1.RuntimeClass) },
	"rbac.authorization.k8s.io/v1 ClusterRole":        func() any { return new(rbacv1.ClusterRole) },
	"rbac.authorization.k8s.io/v1 ClusterRoleBinding": func() any { return new(rbacv1.ClusterRoleBinding) },
	"rbac.authorization.k8s.io/v1 Role":               func() any { return new(rbacv1.Role) },
	"rbac.authorization.k8s.io/v1 RoleBinding":        func() any { return new(rbacv1.RoleBinding) },
}

// decode decodes every document of a manifest and returns their number.
func decode(manifest []byte) (int, error) {
	count := 0
	for _, document := range bytes.Split(append([]byte("\n"), manifest...), []byte("\n---\n")) {
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(document, &meta); err != nil {
			return count, err
		}
		if meta == (metav1.TypeMeta{}) {
			continue // comments alone
		}
		of := meta.APIVersion + " " + meta.Kind
		object, known := types[of]
		if !known {
			return count, fmt.Errorf("%q is not a type of these manifests", of)
		}
		if err := yaml.UnmarshalStrict(document, object()); err != nil {
			return count, fmt.Errorf("%s: %w", of, err)
		}
		count++
	}
	return count, nil
}

// MANIFESTS names the manifests, separated as in PATH; by default those of the repository.
func TestManifestsDecodeStrictly(t *testing.T) {
	paths := filepath.SplitList(os.Getenv("MANIFESTS"))
	if len(paths) == 0 {
		for _, path := range []string{
			"runtimeclass.yaml", "rbac/rbac.yaml", "installer/daemonset.yaml",
			"uninstaller/daemonset.yaml",
		} {
			paths = append(paths, filepath.Join("../../../packaging/kubernetes", path))
		}
	}
	for _, path := range paths {
		manifest, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		count, err := decode(manifest)
		if err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if count == 0 {
			t.Errorf("%s: no object", path)
		}
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
